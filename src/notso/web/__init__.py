"""Floor 3: pages, streams and sessions for people. Sees the model through its public names only."""
