"""Experiments: recipes, settings, seeds and numbers of training rows compared on one task."""
