"""The CPU: its kernels, its threads, and its memory."""
