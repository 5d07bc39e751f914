"""Fixtures that run plugins in separate processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from plugins.installed_plugins import install

from notso.plugins.process import START_SECONDS, PluginProcess


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], PluginProcess]]:
    """Start a test plugin, and wait until it is on or off."""
    install(tmp_path, monkeypatch)
    processes = []

    def start(name: str) -> PluginProcess:
        process = PluginProcess(name)
        processes.append(process)
        process.start()
        process.ready.wait(START_SECONDS)
        return process

    yield start
    for process in processes:
        process.close()
