"""Tuning a model with conversations of one's own: rows, training by TRL and PEFT, and what comes of it as files."""
