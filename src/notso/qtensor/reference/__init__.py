"""Readable numpy implementations of formats and operations; reference for the kernels."""
