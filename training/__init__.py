"""How the demo model is made: corpus, training, export and score."""
