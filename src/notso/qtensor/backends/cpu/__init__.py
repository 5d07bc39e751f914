"""The CPU backend: kernels, threads and memory."""
