"""Choose the rows and cache blocks of the next step."""
