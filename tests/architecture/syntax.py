"""Syntax trees of the repository's Python files, parsed once for all tests of a process."""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path


@cache
def tree(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    was_enabled = gc.isenabled()
    gc.disable()  # a tree is all objects and no garbage
    try:
        return ast.parse(path.read_bytes())
    finally:
        if was_enabled:
            gc.enable()


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a file."""
    return tuple(ast.walk(tree(path)))
