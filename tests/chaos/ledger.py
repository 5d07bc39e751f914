"""What was attacked, how often, and what came of it: `make chaos` keeps it, and writes docs/reliability.md from it."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LONG = os.environ.get("CHAOS") == "long"
"""Whether attacks run at full length, with times judged. The short form of the default suite judges no time."""

RESULTS = Path(__file__).with_name("results")  # a file for each test
LIMITS = {
    "page p99 ms": 300.0,
    "livez p99 ms": 250.0,
    "memory rise MB": 300.0,
    "log MB": 1.0,
}
"""What one client may cost the others, at most. Figures without an entry are told and not judged."""

SECTIONS = {
    "clients": "One bad client",
    "store": "What was acknowledged is kept",
    "files": "Files of strangers",
    "engine": "The engine and its caches",
    "holes": "One key beside another person",
    "soak": "For hours",
    "cluster": "Several servers",
}


class Ledger:
    """The entry of one test: give it to `note` once, at the end."""

    def __init__(self, test: str) -> None:
        self._test = test

    def note(
        self, section: str, fault: str, tried: str, failed: int, figures: Mapping[str, float] | None = None
    ) -> None:
        """Judge the figures, and keep them where the attack ran at full length.

        `tried` says what was done and how often, `failed` counts what must not have happened and did.
        """
        assert section in SECTIONS
        figures = {name: round(value, 1) for name, value in (figures or {}).items()}
        if LONG:
            entry = {
                "section": section,
                "fault": fault,
                "tried": tried,
                "failed": failed,
                "figures": figures,
                "machine": _machine(),
            }
            RESULTS.mkdir(exist_ok=True)
            (RESULTS / f"{self._test}.json").write_text(json.dumps(entry, indent=1) + "\n")
        over = {
            name: value
            for name, value in figures.items()
            if name in LIMITS and value > LIMITS[name] and (LONG or not name.endswith(" ms"))
        }
        assert not failed, f"{failed} failed: {fault}; tried {tried}; {figures}"
        assert not over, f"over the limit: {over}; {fault}; tried {tried}; all: {figures}"


def kept() -> dict[str, dict[str, Any]]:
    """Test -> what it noted when it last ran at full length."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}


def report(entries: Mapping[str, Mapping[str, Any]]) -> str:
    """docs/reliability.md as it is to be."""
    lines = [
        "# Reliability: what was tried, and what failed",
        "",
        "Written by `make chaos` from what the tests of `tests/chaos` note at full length. `make check` runs each of",
        "them in a short form, and judges no times. Do not edit this page: a test compares it with the results.",
        "",
        "Limits while one client attacks: "
        + ", ".join(f"{name} {limit:g}" for name, limit in LIMITS.items())
        + ". A `page` is a chat that has nothing to do with the attack, asked for on a connection of its own.",
        "Zero failures in N tries mean a true rate below 3/N with 95 % confidence.",
    ]
    for section, title in SECTIONS.items():
        rows = {test: entry for test, entry in entries.items() if entry["section"] == section}
        if not rows:
            continue
        lines += ["", f"## {title}", "", "| fault | tried | failed | figures | command |", "|---|---|---|---|---|"]
        for test, entry in rows.items():
            figures = ", ".join(f"{name} {value:g}" for name, value in entry["figures"].items()) or "-"
            command = f"make chaos ARGS=\"-k '{test}'\""
            lines.append(f"| {entry['fault']} | {entry['tried']} | {entry['failed']} | {figures} | `{command}` |")
    machines = sorted({entry["machine"] for entry in entries.values()})
    lines += ["", "Measured on: " + "; ".join(machines) + ".", ""]
    return "\n".join(lines)


def _machine() -> str:
    cpus = len(os.sched_getaffinity(0))
    return f"{cpus} cores of {platform.machine()}, {platform.system()}, Python {platform.python_version()}"


if __name__ == "__main__":
    sys.stdout.write(report(kept()))
