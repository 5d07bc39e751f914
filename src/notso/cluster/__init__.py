"""Replicas of the server on several machines, run by Ray Serve (an optional extra)."""

# Only `batch_pool`, `control` and `replica` import Ray.
