"""Replicas are servers that share a database. They exchange messages, and stream each other's answers to browsers."""
