"""A plugin whose import raises an error."""

raise RuntimeError("no import for you")
