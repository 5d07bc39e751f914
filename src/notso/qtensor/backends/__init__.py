"""Device backends that implement one protocol."""
