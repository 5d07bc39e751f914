"""Define the strings, ids, settings and errors of the web layer."""
