"""Language in: from messages and text to token ids."""
