"""Forward pass, weights and step execution."""
