"""`notso bench --compare` measures alternately with a peer, for which a fake module with the peer's name is used."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from notso.smollm3.hub.registry import demo_path

# Fake llama_cpp. A step takes 40 ms, or 5 ms with flash attention, on a fake clock, so that other load has no effect.
# It rejects q8_0 and positions out of order.
STAND_IN = """
import time
from types import SimpleNamespace as Thing
passed = [time.perf_counter()]
time.perf_counter = lambda: passed[0]
__version__ = "0.0-played"
LLAMA_FLASH_ATTN_TYPE_ENABLED, GGML_TYPE_Q8_0 = 1, 8
def llama_log_callback(function): return function
def llama_log_set(callback, data): pass
def llama_backend_init(): print("noise on stdout")
def llama_model_default_params(): return Thing()
def llama_model_load_from_file(path, params):
    assert open(path, "rb").read(4) == b"GGUF"
    return Thing()
def llama_model_free(model): pass
def llama_model_get_vocab(model): return model
def llama_vocab_n_tokens(model): return 2000
def llama_context_default_params(): return Thing(type_k=1)
def llama_init_from_model(model, params):
    if params.type_k == GGML_TYPE_Q8_0: return None
    return Thing(ms=5 if params.flash_attn_type else 40, held={}, **vars(params))
def llama_free(context): context.freed = True
def llama_batch_init(room, embd, sequences):
    lists = {name: [0] * room for name in ("token", "pos", "logits", "n_seq_id")}
    return Thing(n_tokens=0, seq_id=[[0] for _ in range(room)], **lists)
def llama_get_memory(context): return context.held
def llama_memory_clear(memory, data): memory.clear()
def llama_decode(context, batch):
    for i in range(batch.n_tokens):
        sequence = context.held.setdefault(batch.seq_id[i][0], [])
        if batch.pos[i] != len(sequence): return -1
        sequence.append(batch.token[i])
    passed[0] += context.ms / 1000
    return 0
def llama_synchronize(context): pass
def llama_state_seq_get_size(context, sequence): return len(context.held[sequence])
def llama_state_seq_get_data(context, out, size, sequence): return size
def llama_state_seq_set_data(context, data, size, sequence):
    context.held[sequence] = [0] * size
    return size
def llama_memory_seq_add(memory, sequence, first, last, delta): assert delta == len(memory.get(0, []))
def llama_memory_seq_cp(memory, source, target, first, last): memory.setdefault(target, []).extend(memory[source])
def llama_memory_seq_rm(memory, sequence, first, last):
    if first < 0: del memory[sequence]
    else: del memory[sequence][first:]
"""


def command(*options: str) -> list[str]:
    prompts, depths = ("--prefill=32", "--prefill=16@1100"), ("--depth=0", "--depth=1100")
    sizes = (*prompts, *depths, "--decode=4", "--batch=3", "--repeat=1")
    return [sys.executable, "-m", "notso", "bench", str(demo_path()), *sizes, *options]


def environment(python_path: Path | None) -> dict[str, str]:
    env = {**os.environ, "PYTHONPATH": str(python_path or ""), "NO_COLOR": "1"}
    env.pop("NOTSO_PEER_PYTHON", None)
    return env


def bench(*options: str, python_path: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*options), capture_output=True, text=True, env=environment(python_path), check=False, timeout=120
    )


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the JSON output of the benchmark with the fake peer."""
    folder = tmp_path_factory.mktemp("peer")
    (folder / "llama_cpp.py").write_text(STAND_IN)
    run = bench("--compare", "llama.cpp", "--json", python_path=folder)
    assert run.returncode == 0, run.stderr
    said: dict[str, Any] = json.loads(run.stdout)
    return said


def test_report_contains_peer_results_and_ratios(compared: dict[str, Any]) -> None:
    result = compared
    peer, ratio = result["peer"], result["ratio"]
    assert peer["name"] == "llama.cpp" and peer["version"] == "0.0-played"
    assert peer["memory"]["rss_mb"] > 5
    for kind, keys in (("prefill", ("tokens", "depth")), ("decode", ("depth",)), ("batch", ("sequences",))):
        assert len(result[kind]) == len(peer[kind]) == len(ratio[kind]) > 0
        for ours, theirs, quotient in zip(result[kind], peer[kind], ratio[kind], strict=True):
            assert [ours[key] for key in keys] == [theirs[key] for key in keys] == [quotient[key] for key in keys]
            assert abs(quotient["ratio"] - ours["tok_s"] / theirs["tok_s"]) < 0.01 * quotient["ratio"]


def test_fastest_peer_configuration_is_reported(compared: dict[str, Any]) -> None:
    peer = compared["peer"]
    rows = peer["prefill"] + peer["decode"] + peer["batch"]
    assert all("f16 cache, flash attention on" in row["configuration"] for row in rows)
    assert peer["decode"][0]["tok_s"] == pytest.approx(200, rel=0.01), "a step takes 5 milliseconds"


def test_missing_peer_package_is_reported(tmp_path: Path) -> None:
    (tmp_path / "llama_cpp.py").write_text("raise ImportError")
    run = bench("--compare", "llama.cpp", python_path=tmp_path)
    assert run.returncode == 2 and "llama-cpp-python is not installed" in run.stderr
    assert "Traceback" not in run.stderr


def test_openvino_requires_its_own_model(tmp_path: Path) -> None:
    (tmp_path / "openvino_genai.py").write_text("")
    run = bench("--compare", "openvino", python_path=tmp_path)
    assert run.returncode == 2 and "NOTSO_OPENVINO_MODEL" in run.stderr
    assert "Traceback" not in run.stderr


def test_peer_failure_is_reported(tmp_path: Path) -> None:
    failing = STAND_IN.replace('print("noise on stdout")', 'raise OSError("no such luck")')
    (tmp_path / "llama_cpp.py").write_text(failing)
    run = bench("--compare", "llama.cpp", python_path=tmp_path)
    assert run.returncode == 1 and "no such luck" in run.stderr
    assert "Traceback" not in run.stderr


def test_an_unknown_peer_is_refused() -> None:
    run = bench("--compare", "gremlin")
    assert run.returncode == 2 and "llama.cpp" in run.stderr


@pytest.mark.parametrize(
    ("library", "kind"), [("PyDLL", signal.SIGKILL), ("CDLL", signal.SIGTERM), ("PyDLL", signal.SIGINT)]
)
def test_peer_process_exits_when_benchmark_is_killed(tmp_path: Path, kind: signal.Signals, library: str) -> None:
    """The peer is in a step that takes an hour and, with PyDLL, never releases the interpreter lock."""
    step = f"open('at_work', 'w').write(str(os.getpid())); ctypes.{library}(None).sleep(3600)"
    (tmp_path / "llama_cpp.py").write_text(
        "import ctypes, os" + STAND_IN.replace("passed[0] += context.ms / 1000", step)
    )
    run = subprocess.Popen(
        command("--compare", "llama.cpp"),
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    said = tmp_path / "at_work"
    _until(lambda: said.is_file() and said.read_text() != "")
    peer = int(said.read_text())
    assert _lives(peer)
    run.send_signal(kind)
    run.wait(60)
    _until(lambda: not _lives(peer))


def _until(true: object, seconds: float = 60.0) -> None:
    assert callable(true)
    ends = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.02)


def _lives(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # zombie: it has ended, but its parent has not waited for it
