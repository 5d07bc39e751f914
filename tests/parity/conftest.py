"""Live comparisons take minutes and need large libraries, so they run only on request (`make parity`)."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "parity" in (config.option.markexpr or ""):
        return
    live = [item for item in items if HERE in item.path.parents]
    if live:
        config.hook.pytest_deselected(items=live)
        items[:] = [item for item in items if item not in live]
