"""A GPU for tests: the CUDA backend over a driver of our own that runs the kernels on the CPU."""
