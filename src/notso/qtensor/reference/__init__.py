"""The slow twins: every block format and every op in numpy, to be read, and the oracle of the kernels."""
