"""Tools that the model can call in a chat, with the user's permission."""
