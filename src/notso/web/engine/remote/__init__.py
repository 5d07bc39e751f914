"""Remote engine, as used by a front end."""
