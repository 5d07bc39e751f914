"""Engine API for front ends of the same release; not for other clients."""
