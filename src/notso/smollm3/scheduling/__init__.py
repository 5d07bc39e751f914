"""Scheduling: rows and blocks of the next step, without arrays."""
