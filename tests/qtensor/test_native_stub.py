"""The native module's type stub is up to date; `make stub` regenerates it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

STUB = Path(__file__).parents[2] / "src" / "notso" / "qtensor" / "_native.pyi"


def test_stub_matches_the_native_module(tmp_path: Path) -> None:
    pytest.importorskip("nanobind", reason="nanobind writes the stub; it is not installed")
    fresh = tmp_path / "_native.pyi"
    command = [sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "notso.qtensor._native", "-o", str(fresh)]
    subprocess.run(command, check=True, timeout=60, capture_output=True)
    assert fresh.read_text() == STUB.read_text(), "the bindings have changed: run make stub"
