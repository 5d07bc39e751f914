"""llama.cpp's own server tests, if LLAMA_CPP names a clone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).parents[1] / "llama_cpp/suite.py"


@pytest.mark.timeout(0)
@pytest.mark.skipif(not os.environ.get("LLAMA_CPP"), reason="LLAMA_CPP names no clone of llama.cpp")
def test_llama_cpp_server_tests_have_expected_results() -> None:
    told = subprocess.run([sys.executable, str(SUITE)], capture_output=True, text=True)
    assert told.returncode == 0, told.stdout + told.stderr
