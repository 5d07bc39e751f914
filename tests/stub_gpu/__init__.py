"""A GPU for tests: the CUDA backend with a stub driver that runs the kernels on the CPU."""
