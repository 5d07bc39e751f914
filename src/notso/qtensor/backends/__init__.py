"""Who computes: one protocol, and behind it each kind of device."""
