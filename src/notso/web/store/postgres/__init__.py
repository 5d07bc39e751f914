"""The store in a PostgreSQL database, which several processes share."""
