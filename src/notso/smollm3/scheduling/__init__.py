"""Scheduling: choosing the rows and cache blocks of the next step. Touches no tensor data."""
