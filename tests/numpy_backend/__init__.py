"""A second backend in NumPy: slow, readable versions of the kernels, with its own array type."""
