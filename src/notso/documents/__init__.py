"""Extraction of text from documents, in a sandboxed child process."""
