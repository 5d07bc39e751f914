"""Sign-in methods other than the server's API key, and the usage, quotas and audit log of users."""
