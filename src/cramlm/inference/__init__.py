"""Predict and explain with an exported model."""
