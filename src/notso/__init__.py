"""Run SmolLM3-3B from its GGUF file: quantised blocks multiplied as they are, a chat page, an OpenAI-style API."""
