"""Keys and values: in memory, on disk, and what makes them comparable."""
