"""The tokenizer, the encoder and its heads, and reading and writing of Hugging Face folders."""
