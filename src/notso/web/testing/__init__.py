"""Stand-ins for tests and for work on the page."""
