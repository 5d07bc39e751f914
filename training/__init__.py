"""Training of the demo model: corpus, training, export and evaluation."""
