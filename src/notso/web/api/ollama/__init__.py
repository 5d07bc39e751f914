"""Ollama's API: /api/chat, /api/generate and the endpoints its clients query first."""
