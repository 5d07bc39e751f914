"""The chat pages: routes, views of chats, submission of questions, imports and exports."""
