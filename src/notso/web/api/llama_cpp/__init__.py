"""POST /completion: llama.cpp's completion API."""
