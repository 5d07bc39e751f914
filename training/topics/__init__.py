"""Topics of the training corpus."""
