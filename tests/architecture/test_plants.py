"""Typical changes need few edited files: each is applied to a copy of the tree and tested there."""

from __future__ import annotations

from pathlib import Path

import pytest
from plant import PLANTS, planted

QUICK = ("setting",)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long("plants")) for name in PLANTS]
)
def test_typical_change_works_and_edits_few_files(name: str, tmp_path: Path) -> None:
    assert planted(name, tmp_path) <= PLANTS[name].goal
