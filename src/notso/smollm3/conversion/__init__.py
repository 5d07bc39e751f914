"""Conversion of Hugging Face model folders to GGUF files."""
