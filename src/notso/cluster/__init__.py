"""Replicas of the server on many machines, by Ray Serve: an extra. What knows Ray is asked for only where somebody uses
it, and is `batch_pool`, `control` and `replica`."""
