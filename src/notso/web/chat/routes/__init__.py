"""Routes of the chat page."""
