"""Replicas of the server on several machines, run by Ray Serve, and batches on several machines, run by Ray Data."""

# Ray is an optional dependency. Only `batch_pool`, `control` and `replica` import it.
