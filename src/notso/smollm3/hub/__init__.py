"""Model files: which are known, which are here, and fetching them."""
