"""Text processing: from messages and text to token ids."""
