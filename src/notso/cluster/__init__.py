"""Replicas on many machines through Ray Serve, an optional extra. Only `batch_pool`, `control` and `replica` import
Ray."""
