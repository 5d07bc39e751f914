"""Engine API for front ends of the same release only."""
