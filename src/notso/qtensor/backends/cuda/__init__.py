"""CUDA backend: driver, memory and operations."""
