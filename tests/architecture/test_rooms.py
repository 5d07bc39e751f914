"""Imports form no cycles, and import contracts list few names per row."""

from __future__ import annotations

import ast
import re
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from architecture.syntax import nodes

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
MODULES = sorted(SOURCE.rglob("*.py"))

MOST_NAMES = 7

# Allowed cycles: only one between a module and a package in the same folder.
CIRCLES = {
    "notso.qtensor: reference, tensor": "a tensor dequantizes itself by reference/blocks, reference/ops takes tensors",
}

Graph = dict[str, set[str]]


def imported(path: Path) -> set[str]:
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def graphs() -> dict[str, Graph]:
    """Return an import graph of modules and packages for each folder; a package's imports include its modules'."""
    modules = {".".join(path.relative_to(SOURCE).with_suffix("").parts): path for path in MODULES}
    packages = {name.removesuffix(".__init__") for name in modules if name.endswith(".__init__")}
    found: dict[str, Graph] = {name: {} for name in packages}
    for name, path in modules.items():
        here = name.split(".")
        for depth in range(1, len(here)):
            found[".".join(here[:depth])].setdefault(here[depth], set())
        for target in imported(path):
            while target and target not in modules and target not in packages:
                target = target.rpartition(".")[0]
            there = target.split(".")
            depth = next((i for i, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), 0)
            if depth and here[depth] != "__init__":  # an __init__ only exports names
                found[".".join(here[:depth])][here[depth]].add(there[depth])
    return found


def test_imports_form_no_unlisted_cycles() -> None:
    """No two modules or packages of a folder depend on each other, not even indirectly."""
    found = graphs()
    assert len(found) > 25 and "values" in found["notso.smollm3"]["engine"]
    circles = []
    for folder, graph in found.items():
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            circles.append(f"{folder}: {', '.join(sorted(set(error.args[1])))}")
    assert circles == list(CIRCLES)


def test_import_cycle_is_detected() -> None:
    graph = graphs()["notso.smollm3"]
    graph["values"].add("engine")
    with pytest.raises(CycleError):
        TopologicalSorter(graph).prepare()


def test_contract_rows_have_few_names() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    rows = [row for contract in contracts for row in contract.get("layers", [])]
    assert len(rows) > 30 and not [row for row in rows if len(re.split(r"[|:]", row)) > MOST_NAMES]
