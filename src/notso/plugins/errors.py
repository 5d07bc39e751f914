"""Plugin errors. Each message is one line."""

from __future__ import annotations

from notso.smollm3 import NotsoError


class PluginError(NotsoError):
    """A plugin is missing, failed, or was disabled."""

    def __init__(self, message: str, *, plugin: str) -> None:
        super().__init__(message)
        self.plugin = plugin


class PluginRefusalError(PluginError):
    """The plugin refused a request by raising Refused with a reason, and keeps running."""
