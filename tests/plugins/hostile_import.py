"""A plugin that does not even load."""

raise RuntimeError("no import for you")
