"""Convert Markdown and other model output to safe HTML."""
