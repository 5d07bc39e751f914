"""POST /completion: text written on, in the form that llama.cpp's server gives it."""
