"""List and load installed plugins. Only this module imports code that is named by package metadata."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from notso.plugins.values import Plugin

GROUP = "notso.plugins"
"""Entry point group in which the pyproject.toml of each plugin has an entry `NAME = "module:PLUGIN"`."""


@dataclass(frozen=True, slots=True)
class InstalledPlugin:
    name: str
    distribution: str
    version: str


def list_installed() -> list[InstalledPlugin]:
    found = {point.name: point for point in entry_points(group=GROUP)}
    return [
        InstalledPlugin(name, point.dist.name if point.dist else "", point.dist.version if point.dist else "")
        for name, point in sorted(found.items())
    ]


def load(name: str) -> Plugin:
    """Import a plugin. Call only in the plugin's process. Raises LookupError, TypeError, or any error of the plugin."""
    point: EntryPoint | None = next(iter(entry_points(group=GROUP, name=name)), None)
    if point is None:
        raise LookupError(f"no plugin {name} is installed")
    plugin = point.load()
    if not isinstance(plugin, Plugin):
        raise TypeError(f"{point.value} is not a notso.plugins.Plugin")
    return plugin
