"""Which model answers, which are here, and fetching the one that is not."""
