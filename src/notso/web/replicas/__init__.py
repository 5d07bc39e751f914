"""Replicas (servers that share a database): messages between them, and reading of each other's answers."""
