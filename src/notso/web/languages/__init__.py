"""Strings of the pages, in a table for each language."""
