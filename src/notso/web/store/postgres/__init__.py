"""PostgreSQL implementation of the store, shared by several processes."""
