"""Looking at files, machines and engines: measure, inspect, verify, make."""
