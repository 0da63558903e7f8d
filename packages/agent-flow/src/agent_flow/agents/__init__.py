"""Agent scaffolds."""
