"""Benchmark, inspect, verify and synthesize models."""
