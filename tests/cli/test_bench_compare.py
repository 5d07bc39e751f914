"""`notso bench --compare`: a peer measured in turns, played here by a module of the real one's name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from notso.smollm3.hub import demo_path

STAND_IN = """
import time
__version__ = "0.0-played"
class Llama:
    def __init__(self, path, **options):
        assert open(path, "rb").read(4) == b"GGUF" and options["n_threads"] >= 1
        self.held = 0
    def n_vocab(self):
        return 2000
    def reset(self):
        self.held = 0
    def eval(self, ids):
        self.held += len(ids)
        time.sleep(0.001 * len(ids))
"""


def bench(*options: str, python_path: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "notso", "bench", str(demo_path()), "--prefill", "32", "--decode", "4"]
    env = {**os.environ, "PYTHONPATH": str(python_path or ""), "NO_COLOR": "1"}
    env.pop("NOTSO_PEER_PYTHON", None)
    return subprocess.run([*command, "--repeat", "1", *options], capture_output=True, text=True, env=env, check=False)


def test_the_peer_stands_beside_our_figures(tmp_path: Path) -> None:
    (tmp_path / "llama_cpp.py").write_text(STAND_IN)
    run = bench("--compare", "llama.cpp", "--json", python_path=tmp_path)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    peer = result["peer"]
    assert peer["name"] == "llama.cpp" and peer["version"] == "0.0-played"
    assert 0 < peer["prefill"][0]["tok_s"] < 1000 and 0 < peer["decode"][0]["tok_s"] < 1000
    ours, ratio = result["prefill"][0]["tok_s"], result["ratio"]["prefill"][0]["ratio"]
    assert abs(ratio - ours / peer["prefill"][0]["tok_s"]) < 0.01 * ratio


def test_a_peer_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "llama_cpp.py").write_text("raise ImportError")
    run = bench("--compare", "llama.cpp", python_path=tmp_path)
    assert run.returncode == 2 and "llama-cpp-python is not installed" in run.stderr
    assert "Traceback" not in run.stderr


def test_an_unknown_peer_is_refused() -> None:
    run = bench("--compare", "gremlin")
    assert run.returncode == 2 and "llama.cpp" in run.stderr
