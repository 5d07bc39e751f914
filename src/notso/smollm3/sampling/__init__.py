"""Language chosen: from logits to the next token."""
