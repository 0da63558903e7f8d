"""Tokenizer back ends: where ids come from, and the proof that a faster one gives the same."""
