"""The import contracts of pyproject.toml hold, and each of them breaks when a wall is climbed over."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytest.importorskip("importlinter", reason="import-linter is a lint tool and not installed here")

ROOT = Path(__file__).parents[2]

# Contract, the module that climbs, and what it says. The module is added to if it exists.
CLIMBERS = [
    ("floors", "smollm3/stops.py", "import notso.web.app"),
    ("floors", "surprise/__init__.py", '"""A floor that nobody drew."""'),
    ("web-public-names", "web/ids.py", "from notso.smollm3.tokenizer import Tokenizer"),
    ("web-public-names", "web/ids.py", "import numpy"),
    ("web-public-names", "web/ids.py", "from notso.qtensor import ops"),
    ("tensors-alone", "qtensor/formats.py", "import notso.smollm3"),
    ("oracle", "qtensor/reference/blocks.py", "from notso.qtensor.backend import native"),
    ("asyncio", "smollm3/engine.py", "import asyncio"),
    ("model-no-service", "smollm3/engine.py", "import sqlite3"),
    ("tensors-inside", "qtensor/formats.py", "from notso.qtensor import gguf"),
    ("model-inside", "smollm3/messages.py", "from notso.smollm3 import engine"),
]


def contract_holds(contract: str | None, source: Path) -> tuple[bool, str]:
    # -S leaves the installed package aside, which would be found before the copy
    only = () if contract is None else (contract,)
    code = (
        "import sys\n"
        f"sys.path[:0] = [{str(source)!r}, {sysconfig.get_paths()['purelib']!r}]\n"
        "from importlinter.cli import lint_imports\n"
        f"config = {str(ROOT / 'pyproject.toml')!r}\n"
        f"sys.exit(lint_imports(config_filename=config, limit_to_contracts={only!r}, no_cache=True))\n"
    )
    run = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, timeout=120, cwd=source)
    assert "kept" in run.stdout and "broken" in run.stdout, run.stdout + run.stderr
    return run.returncode == 0, run.stdout


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package without its data, to be damaged."""
    unwanted = shutil.ignore_patterns("__pycache__", "*.gguf", "static", "templates", "*.so")
    shutil.copytree(ROOT / "src" / "notso", tmp_path / "notso", ignore=unwanted)
    return tmp_path


def test_all_contracts_hold(copy: Path) -> None:
    import tomllib

    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    assert {contract["id"] for contract in contracts} == {contract for contract, _, _ in CLIMBERS}
    holds, report = contract_holds(None, copy)
    assert holds, report


@pytest.mark.parametrize(("contract", "module", "line"), CLIMBERS)
def test_a_climber_is_seen(contract: str, module: str, line: str, copy: Path) -> None:
    path = copy / "notso" / module
    path.parent.mkdir(exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(f"\n{line}\n")
    holds, report = contract_holds(contract, copy)
    assert not holds, report
