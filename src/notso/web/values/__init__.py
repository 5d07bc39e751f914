"""Words, ids, settings and errors of the web floor."""
