"""SQLite implementation of the store."""
