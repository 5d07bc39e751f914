"""A GPU for tests: the CUDA backend with a stub driver, which runs the kernels on the CPU."""
