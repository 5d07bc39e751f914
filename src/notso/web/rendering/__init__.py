"""Conversion of text to safe HTML: Markdown is rendered, and the resulting HTML is sanitized."""
