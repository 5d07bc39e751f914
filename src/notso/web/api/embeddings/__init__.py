"""POST /v1/embeddings and llama-server's POST /embedding."""
