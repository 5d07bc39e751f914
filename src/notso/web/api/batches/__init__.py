"""OpenAI's APIs for files, batches and vector stores."""
