"""Floor 2: SmolLM3 and how it is run."""
