"""Sign-in methods besides the server's key."""
