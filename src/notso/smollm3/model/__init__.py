"""The forward pass, its weights, and how a step is run."""
