"""The errors of plugins. Each message is one line that names the plugin.

NotsoError
└── PluginError          a plugin is not there, failed, or was switched off
    └── PluginRefusalError    it says that what was asked cannot be done; it goes on
"""

from __future__ import annotations

from notso.smollm3 import NotsoError


class PluginError(NotsoError):
    """A plugin is not there, failed, or was switched off. `plugin` is its name."""

    def __init__(self, message: str, *, plugin: str) -> None:
        super().__init__(message)
        self.plugin = plugin


class PluginRefusalError(PluginError):
    """It cannot do what was asked, and says why."""
