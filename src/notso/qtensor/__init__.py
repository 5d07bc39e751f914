"""Floor 1: quantised tensors and the kernels that multiply them. Knows formats and arithmetic, no model."""
