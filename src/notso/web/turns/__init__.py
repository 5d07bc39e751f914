"""Run chat turns: build prompts, generate answers, and log the events that pages read."""
