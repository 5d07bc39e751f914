"""Ways to know who sent a request, besides the key of the server."""
