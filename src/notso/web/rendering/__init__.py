"""Conversion of Markdown and other model output to safe HTML."""
