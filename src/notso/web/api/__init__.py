"""Routes for programs rather than people."""
