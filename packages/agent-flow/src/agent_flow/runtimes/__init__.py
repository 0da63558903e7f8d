"""Runtimes: where tasks come from, and how a patch is judged."""
