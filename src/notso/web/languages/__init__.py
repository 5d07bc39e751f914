"""Strings of the pages: a table for each language."""
