"""What the demo model learns, one module for each topic."""
