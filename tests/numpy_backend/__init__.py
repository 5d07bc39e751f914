"""A second backend: the slow readable twins of the kernels, over arrays of its own."""
