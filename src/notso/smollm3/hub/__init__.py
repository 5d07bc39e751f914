"""Model files: known, local and downloadable ones."""
