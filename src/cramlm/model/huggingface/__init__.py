"""Weights and configurations in and out of Hugging Face folders."""
