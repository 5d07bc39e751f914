"""Import and export of chats, including export as training rows."""
