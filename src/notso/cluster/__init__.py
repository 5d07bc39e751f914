"""On several machines: replicas of the server, run by Ray Serve, and batches, run by Ray Data."""

# Ray is an optional dependency. Only `batch_pool`, `control` and `replica` import it.
