"""Why somebody could not be signed in."""

from __future__ import annotations


class SignInError(Exception):
    """One sentence about it, fit to be shown."""
