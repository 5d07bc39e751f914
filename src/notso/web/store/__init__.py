"""Store chats, documents and API keys in SQLite or PostgreSQL. All SQL is in this package."""
