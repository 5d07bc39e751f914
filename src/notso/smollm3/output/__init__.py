"""Output processing: from token ids to events."""
