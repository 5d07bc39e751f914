"""Remote engine: lets a front end (a server without a model) use the engine of another server."""
