"""Which plugins are installed, and loading one: the only place that runs what another distribution says to import.

A listing reads names only. `load` runs the plugin's code, and is called in the plugin's own process alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from notso.plugins.values import Plugin

GROUP = "notso.plugins"
"""The entry-point group: a distribution's pyproject.toml names `NAME = "module:PLUGIN"` in it."""


@dataclass(frozen=True, slots=True)
class Installed:
    """A plugin that could be switched on: its name, and the distribution and release that it came with."""

    name: str
    distribution: str
    version: str


def installed() -> list[Installed]:
    """All of them by name; none of their code runs."""
    found = {point.name: point for point in entry_points(group=GROUP)}
    return [
        Installed(name, point.dist.name if point.dist else "", point.dist.version if point.dist else "")
        for name, point in sorted(found.items())
    ]


def load(name: str) -> Plugin:
    """Import one and return what it gives. Raises LookupError: there is none of that name; TypeError: it gives no
    Plugin; and whatever its code raises."""
    point: EntryPoint | None = next(iter(entry_points(group=GROUP, name=name)), None)
    if point is None:
        raise LookupError(f"no plugin {name} is installed")
    given = point.load()
    if not isinstance(given, Plugin):
        raise TypeError(f"{point.value} is no notso.plugins.Plugin")
    return given
