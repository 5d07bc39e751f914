"""Rewrite JSON schemas using only keywords that the grammar library supports."""
