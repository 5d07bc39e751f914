"""Documents: their text, read in a child process that can do nothing else."""
