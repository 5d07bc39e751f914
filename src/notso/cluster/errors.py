"""What can go wrong with a cluster."""

from __future__ import annotations

from notso.smollm3 import NotsoError


class ClusterError(NotsoError):
    """Ray is not installed, cannot be reached, or could not do what it was told."""
