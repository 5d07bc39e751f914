"""Extraction of text from documents, in a child process that has no other rights."""
