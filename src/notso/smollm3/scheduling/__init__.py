"""Scheduling: choosing the rows and cache blocks of the next step."""
