"""Strict, streaming readers of files, local and remote."""
