"""Routes of the chat pages."""
