"""Tools that the model may call in a chat, each asked for and allowed by a person."""
