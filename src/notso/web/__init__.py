"""Web layer: pages, APIs, sessions and rendering. Of `notso.smollm3`, it imports only public names."""
