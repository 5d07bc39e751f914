"""Model folders as Hugging Face has them, made into GGUF files."""
