"""Language out: from token ids to events."""
