"""Import chats, and export them, also as training rows."""
