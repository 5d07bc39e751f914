"""Fixtures for attacks: a server to attack, and a ledger for the results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chaos.ledger import Ledger
from chaos.victim import Victim

LONG = (
    *("body_attacks", "clock_jumps", "cluster", "crowded", "failing_disk", "full_queue", "hostile_mcp"),
    *("hostile_schemas", "killed_documents", "model_files", "soak", "stopped_peers", "stopping_under_load"),
    *("trap_documents", "two_browsers", "unread"),
)
"""Tests that need seconds of two processors or wait for many clients; they run only if the server has changed."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here and item.path.stem.removeprefix("test_") in LONG:
            item.add_marker(pytest.mark.long("chaos"))


@pytest.fixture
def ledger(request: pytest.FixtureRequest) -> Ledger:
    return Ledger(request.node.name)


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Callable[..., Victim]]:
    """Return a function that starts servers; the same `directory` means the same data."""
    started: list[Victim] = []

    def start(more: str = "", directory: str = "data", **settings: Any) -> Victim:
        started.append(Victim(tmp_path / directory, more, **settings))
        return started[-1]

    yield start
    for each in started:
        each.close()
