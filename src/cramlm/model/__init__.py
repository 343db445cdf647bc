"""The tokenizer, the encoder in its two shapes, the heads, and their way to and from Hugging Face folders."""
