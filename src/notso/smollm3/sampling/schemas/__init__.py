"""JSON Schema, rewritten in the keywords that the grammar library supports."""
