"""Names of the standard library that exist on Linux but not on macOS, read from the stubs in mypy."""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterator
from functools import cache
from pathlib import Path

MODULES = ("fcntl", "mmap", "os", "resource", "select", "signal", "socket", "threading", "time")
NEWEST = (3, 13)  # the Python version for which the stubs are evaluated
COMPARISONS = {ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.GtE: operator.ge, ast.Lt: operator.lt}


@cache
def linux_only() -> dict[str, frozenset[str]]:
    """Return for each module the names that its stub declares for Linux but not for macOS."""
    return {module: names(module, "linux") - names(module, "darwin") for module in MODULES}


@cache
def names(module: str, platform: str) -> frozenset[str]:
    """Return the names that a standard library module has on a platform."""
    import mypy

    stubs = Path(mypy.__file__).parent / "typeshed" / "stdlib"
    path = next(path for path in (stubs / f"{module}.pyi", stubs / module / "__init__.pyi") if path.exists())
    return frozenset(_declared(ast.parse(path.read_text("utf-8")).body, platform))


def _declared(body: list[ast.stmt], platform: str) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.If):
            yield from _declared(node.body if _holds(node.test, platform) else node.orelse, platform)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def _holds(test: ast.expr, platform: str) -> bool:
    if isinstance(test, ast.BoolOp):
        parts = [_holds(each, platform) for each in test.values]
        return all(parts) if isinstance(test.op, ast.And) else any(parts)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return not _holds(test.operand, platform)
    if isinstance(test, ast.Name):
        return test.id == "TYPE_CHECKING"
    assert isinstance(test, ast.Compare), ast.unparse(test)
    known = {"sys.platform": platform, "sys.version_info": NEWEST}
    left, right = known[ast.unparse(test.left)], ast.literal_eval(test.comparators[0])
    return bool(COMPARISONS[type(test.ops[0])](left, right))
