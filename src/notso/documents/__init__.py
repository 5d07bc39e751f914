"""Extract text from documents in a sandboxed child process."""
