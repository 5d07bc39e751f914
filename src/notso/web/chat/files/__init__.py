"""Import and export chats, and export training rows."""
