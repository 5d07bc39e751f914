"""A change of one kind needs as few files as it should: each is planted in a copy of the tree and used there."""

from __future__ import annotations

from pathlib import Path

import pytest
from plant import PLANTS, planted

QUICK = ("setting",)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long("plants")) for name in PLANTS]
)
def test_a_planted_change_works_and_needs_few_files(name: str, tmp_path: Path) -> None:
    assert planted(name, tmp_path) <= PLANTS[name].goal
