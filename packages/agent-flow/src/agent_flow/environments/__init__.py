"""Environments: where an agent acts, and the git repository it acts on."""
