"""A turn of a chat: from the prompt to a numbered log of events that any page can watch."""
