"""Slow, readable numpy twins of every operation and format: the oracle the native kernels are held to."""
