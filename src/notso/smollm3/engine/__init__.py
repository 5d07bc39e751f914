"""Where language and tensors meet: requests in, steps, events out."""
