"""Convert Hugging Face model folders to GGUF files."""
