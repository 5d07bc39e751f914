"""Chat turns: prompt construction, execution, and the event log that pages read."""
