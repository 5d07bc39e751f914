"""Results of the attacks in this folder; `make chaos` stores them and writes docs/reliability.md from them."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LONG = os.environ.get("CHAOS") == "long"
"""Whether attacks run at full length, with time limits. The short form has no time limits."""

RESULTS = Path(__file__).with_name("results")  # one file for each test
LIMITS = {
    "page p99 ms": 300.0,
    "livez p99 ms": 250.0,
    "memory rise MB": 300.0,
    "log MB": 1.0,
}
"""Limits on the effect of one client on others. Figures without an entry are only reported."""

SECTIONS = {
    "clients": "One bad client",
    "store": "Acknowledged data",
    "files": "Untrusted files",
    "engine": "The engine and its caches",
    "holes": "One user attacks, another works",
    "soak": "Long runs",
    "cluster": "Several servers",
}


class Ledger:
    """Records the result of one test, with one call of `note` at the end."""

    def __init__(self, test: str) -> None:
        self._test = test

    def note(
        self, section: str, fault: str, tried: str, failed: int, figures: Mapping[str, float] | None = None
    ) -> None:
        """Check the figures against LIMITS, and store them if the attack ran at full length.

        `tried` says what was done and how often; `failed` is the number of failures.
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
    """Return test -> result of its last run at full length."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}


def report(entries: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the content of docs/reliability.md."""
    lines = [
        "# Reliability",
        "",
        "This page lists attacks and faults that were tried, and how often the server failed. `make chaos` runs the",
        "tests in `tests/chaos` at full length and writes the page from their results; `make check` runs a short form",
        "of each test, without limits on times. Do not edit this page: a test compares it with the results.",
        "",
        "Limits while one client attacks: "
        + ", ".join(f"{name} {limit:g}" for name, limit in LIMITS.items())
        + ". `page` is the response time of an unrelated chat, requested on a separate connection, and `livez` is that",
        "of `GET /livez`. Zero failures in N trials mean a failure rate below 3/N with 95% confidence.",
    ]
    for section, title in SECTIONS.items():
        rows = {test: entry for test, entry in entries.items() if entry["section"] == section}
        if not rows:
            continue
        lines += [
            "",
            f"## {title}",
            "",
            "| attack or fault | trials | failures | figures | command |",
            "|---|---|---|---|---|",
        ]
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
