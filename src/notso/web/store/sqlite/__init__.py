"""The store in one SQLite file. No SQL exists outside this package."""
