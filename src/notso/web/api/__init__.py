"""HTTP APIs for programs: OpenAI, Anthropic, Ollama, llama.cpp and vLLM compatible."""
