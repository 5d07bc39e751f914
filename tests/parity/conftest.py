"""Live comparisons take minutes and need large libraries, so they run only on request (`make parity`)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

HERE = str(Path(__file__).parent) + os.sep


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "parity" in (config.option.markexpr or ""):
        return
    live = [item for item in items if str(item.path).startswith(HERE)]
    if live:
        config.hook.pytest_deselected(items=live)
        items[:] = [item for item in items if item not in live]
