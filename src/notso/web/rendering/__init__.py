"""From text to safe HTML: Markdown first, sanitised last."""
