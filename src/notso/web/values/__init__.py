"""Strings, ids, settings and errors of the web layer."""
