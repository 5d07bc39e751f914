"""Readable numpy implementations of formats and operations: the reference for the kernels."""
