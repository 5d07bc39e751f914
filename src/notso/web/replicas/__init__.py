"""Replicas (servers that share a database): they exchange messages, and stream each other's answers to browsers."""
