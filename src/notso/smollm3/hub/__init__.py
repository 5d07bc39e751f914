"""Registry of model files, and downloads from the Hugging Face Hub."""
