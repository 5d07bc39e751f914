"""Device backends behind one protocol."""
