"""OpenAI's files (purpose `batch`) and batches."""
