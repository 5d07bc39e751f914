"""The engine is made in an order in which nothing looks ahead: each part is given what it needs when it is made."""

from __future__ import annotations

import ast
from pathlib import Path

import notso.smollm3.engine

ENGINE = Path(notso.smollm3.engine.__file__).parent / "engine.py"


def tied(source: str) -> list[str]:
    """Assignments to an attribute of anything but `self`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found += [
            ast.unparse(part)
            for target in targets
            if target is not None and isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign)
            for part in ast.walk(target)
            if isinstance(part, ast.Attribute) and not (isinstance(part.value, ast.Name) and part.value.id == "self")
        ]
    return found


def test_nothing_is_tied_to_an_engines_part_afterwards() -> None:
    assert tied(ENGINE.read_text()) == []


def test_a_tie_is_seen() -> None:
    assert tied("cache.make_room = pool.evict_one\nself._runner.placement: int = 3\nself.x, core.y = 1, 2") == [
        "cache.make_room",
        "self._runner.placement",
        "core.y",
    ]
