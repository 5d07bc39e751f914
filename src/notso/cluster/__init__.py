"""Run replicas of the server with Ray Serve, and batches with Ray Data, on several machines."""

# Ray is an optional dependency. Only `batch_pool`, `control` and `replica` import it.
