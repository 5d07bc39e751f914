"""Floor 3: people, requests, sessions, rendering. It knows the model only through `notso.smollm3`'s public names."""
