"""Replicas, servers that share a database: messages between them, and answers followed across them."""
