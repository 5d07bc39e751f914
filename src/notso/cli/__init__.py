"""The front door: one file per verb a person types."""
