"""Engine: requests, steps and events."""
