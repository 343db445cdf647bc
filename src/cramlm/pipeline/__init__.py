"""A run: its stages and their order."""
