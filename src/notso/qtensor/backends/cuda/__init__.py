"""A GPU: its driver, its memory, and the operations on it."""
