"""Benchmarks, inspection, verification and synthesis of models."""
