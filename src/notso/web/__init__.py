"""Web layer: pages, APIs, sessions and rendering. It uses only the public names of `notso.smollm3`."""
