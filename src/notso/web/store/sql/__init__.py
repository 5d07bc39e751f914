"""What the stores in SQL databases have in common: statements that SQLite and PostgreSQL read alike."""
