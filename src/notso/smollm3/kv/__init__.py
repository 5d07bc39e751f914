"""KV cache: storage in memory and on disk."""
