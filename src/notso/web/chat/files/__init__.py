"""Export and import of chats, and export as training rows."""
