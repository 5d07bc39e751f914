"""SQL stores: statements that SQLite and PostgreSQL have in common."""
