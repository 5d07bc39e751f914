"""Conversion of text to safe HTML: Markdown is rendered first, and the HTML is sanitized last."""
