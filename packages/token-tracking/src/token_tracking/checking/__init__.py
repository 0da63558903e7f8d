"""Held tokens against full renders: ours, and those of any other trainer."""
