"""Web layer: pages, APIs, sessions and rendering. It imports only public names of `notso.smollm3`."""
