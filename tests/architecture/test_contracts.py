"""The import contracts in pyproject.toml are kept, and each of them detects a forbidden import."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("importlinter", reason="import-linter is a lint tool and not installed here")

ROOT = Path(__file__).parents[2]

# (module, forbidden import to add to it). A single run of import-linter finds that all contracts are broken.
CLIMBERS = [
    ("smollm3/output/lookahead.py", "import notso.web.app"),  # layers
    ("documents/values.py", "from notso.documents import kinds"),  # documents-inside
    ("system/libsystem.py", "from notso.system import memory"),  # system-inside
    ("web/values/ids.py", "from notso.smollm3.text.tokenizer import Tokenizer"),  # web-public-names
    ("web/values/ids.py", "import numpy"),
    ("web/values/ids.py", "from notso.qtensor.backends.cpu import ops"),
    ("smollm3/kv/kv_cache.py", "from notso.qtensor.backends.cpu import ops"),  # tensors-public-names
    ("cluster/front.py", "from notso.cluster import replica"),  # cluster-inside
    ("plugins/wire.py", "from notso.plugins import process"),  # plugins-inside
    ("plugins/loading.py", "from notso.smollm3.hub import registry"),  # plugins-public-names
    ("qtensor/formats.py", "import typer"),  # tensors-alone
    ("qtensor/reference/blocks.py", "from notso.qtensor import backends"),  # oracle
    ("smollm3/engine/engine.py", "import asyncio"),  # asyncio
    ("smollm3/engine/engine.py", "import sqlite3"),  # model-no-service
    ("qtensor/formats.py", "from notso.qtensor import gguf"),  # tensors-inside
    ("qtensor/backends/protocol.py", "from notso.qtensor.backends.cpu import cpu_backend"),  # devices-apart
    ("qtensor/backends/cpu/huge_pages.py", "from notso.qtensor.backends.cpu import ops"),  # cpu-inside
    ("qtensor/backends/cuda/driver.py", "from notso.qtensor.backends.cuda import program"),  # cuda-inside
    ("smollm3/values/messages.py", "from notso.smollm3.engine import engine"),  # model-inside
    ("smollm3/hub/registry.py", "from notso.qtensor import tensor"),  # tensor-users
    ("smollm3/scheduling/sequence.py", "import numpy"),  # no-arrays
    ("smollm3/text/prompt.py", "from notso.smollm3.kv import offload"),  # language-apart
    ("smollm3/kv/offload.py", "from notso.smollm3.text import prompt"),  # tensors-apart
    ("web/edge/limits.py", "from notso.web.store import tree"),  # web-inside
    ("web/api/messages/fields.py", "from notso.web.api.responses import fields"),  # apis-apart
    ("web/store/tree.py", "from notso.web.store.sqlite import store"),  # store-by-protocol
    ("web/replicas/turn_relay.py", "import valkey"),  # exchange-by-protocol
]


def lint(source: Path) -> tuple[int, str]:
    """Run import-linter on a copy of the package; return its exit code and report. -S hides the installed package,
    which would otherwise be imported first."""
    code = (
        "import sys\n"
        f"sys.path[:0] = [{str(source)!r}, {sysconfig.get_paths()['purelib']!r}]\n"
        "from importlinter.cli import lint_imports\n"
        f"sys.exit(lint_imports(config_filename={str(ROOT / 'pyproject.toml')!r}, no_cache=True))\n"
    )
    run = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, timeout=200, cwd=source)
    assert "kept" in run.stdout and "broken" in run.stdout, run.stdout + run.stderr
    return run.returncode, run.stdout


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Copy the package without its data files, so that a test can change it."""
    unwanted = shutil.ignore_patterns("__pycache__", "*.gguf", "static", "templates", "*.so")
    shutil.copytree(ROOT / "src" / "notso", tmp_path / "notso", ignore=unwanted)
    return tmp_path


def test_import_contracts_are_kept(copy: Path) -> None:
    status, report = lint(copy)
    assert status == 0 and ", 0 broken" in report, report


def test_every_import_contract_detects_a_violation(copy: Path) -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    for module, line in CLIMBERS:
        with (copy / "notso" / module).open("a", encoding="utf-8") as file:
            file.write(f"\n{line}\n")
    status, report = lint(copy)
    assert status != 0 and f"0 kept, {len(contracts)} broken" in report, report
    report = " ".join(report.split())  # long lines are wrapped
    for module, line in CLIMBERS:
        words = line.split()
        climbed = f"{words[1]}.{words[3]}" if words[0] == "from" and words[3].islower() else words[1]
        importer = "notso." + module.removesuffix(".py").replace("/", ".")
        assert f"{importer} -> {climbed}" in report, f"{importer} -> {climbed} was not reported:\n{report}"
