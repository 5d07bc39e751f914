"""The engine as the web sees it: its host, its models, its figures."""
