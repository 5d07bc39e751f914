"""JSON Schema, told in the keywords that the grammar library holds."""
