"""HTTP APIs compatible with those of OpenAI, Anthropic, Ollama, llama.cpp and vLLM."""
