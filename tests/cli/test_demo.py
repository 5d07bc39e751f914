"""On a machine without a model, the packaged demo model answers and identifies itself as a demo."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli.test_real_engine import undocumented

from notso.cli import serve
from notso.qtensor.gguf import GGUFFile
from notso.smollm3.hub import registry
from notso.smollm3.values.engine_config import EngineConfig

Run = Callable[..., Any]


def test_run_answers_with_the_demo_model(process: Callable[..., Any], own_home: Path) -> None:
    run = process("run", "--temperature", "0", "--max-tokens", "300", "hello")
    out, err = run.communicate(timeout=60)

    assert run.returncode == 0
    assert out.strip()
    assert out.endswith(b"\n") and not out.endswith(b"\n\n")
    assert b"Using the tiny built-in demo model; `notso pull` downloads SmolLM3-3B" in err
    assert b"\x1b" not in out + err


def test_reasoning_is_separated_and_can_be_disabled(notso: Run) -> None:
    asked = ["run", "--json", "--temperature", "0", "--max-tokens", "400", "What is 12 + 30?"]
    thought = json.loads(notso(*asked).out)
    direct = json.loads(notso(*asked, "--no-think").out)

    assert thought["demo"] is direct["demo"] is True
    assert thought["reasoning"].strip()
    assert direct["reasoning"] == ""
    assert thought["usage"]["reasoning_tokens"] > 0
    assert thought["text"].strip()
    for told in (thought, direct):
        assert told["finish_reason"] == "stop"
        assert "think>" not in told["text"] + told["reasoning"]


def test_chat_runs_with_the_demo_model(notso: Run) -> None:
    result = notso("chat", "-t", "0", "-n", "300", "--no-think", stdin="hello\nwho are you?\n/status\n")

    assert result.code == 0
    assert len(result.out.splitlines()) >= 2
    assert result.err.count("built-in demo model") == 2


def test_list_inspect_and_verify_recognize_the_demo_model(notso: Run) -> None:
    (listed,) = json.loads(notso("list", "--json").out)
    assert (listed["name"], listed["where"], listed["verified"]) == ("demo", "built in", "built in")

    assert listed["quantization"] == "Q4_K_M"
    with GGUFFile.open(listed["path"]) as file:
        assert file.metadata["general.file_type"] == 15, "ggml's number of Q4_K_M"

    told = json.loads(notso("inspect", listed["path"], "--json").out)
    assert told["problem"] is None
    assert {"Q4_K", "Q6_K", "F32"} <= {total["format"] for total in told["formats"]}
    assert told["size_bytes"] < 10_000_000
    assert notso("verify").out.endswith("\nok\n")


def test_synth_without_tokenizer_creates_a_runnable_model(notso: Run, tmp_path: Path) -> None:
    out = tmp_path / "random.gguf"
    sizes = "--layers 2 --hidden 256 --ffn 512 --heads 4 --kv 1 --vocab 12000"
    assert notso("synth", str(out), *sizes.split()).code == 0

    told = json.loads(notso("run", "-m", str(out), "--json", "-n", "4", "hello").out)
    assert told["demo"] is False
    assert told["usage"]["completion_tokens"] <= 4


def test_bench_without_file_measures_the_demo_model(notso: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from notso.smollm3.diagnostics import benchmark

    probe_buffer = benchmark.probe_buffer
    monkeypatch.setattr(benchmark, "probe_buffer", lambda size_bytes: probe_buffer(size_bytes // 64))
    sizes = "--prefill 64 --decode 8 --repeat 1 --depth 0 --depth 50"
    told = json.loads(notso("bench", "--json", *sizes.split()).out)

    assert told["model"]["demo"] is True
    assert [row["depth"] for row in told["decode"]] == [0, 50]
    assert all(0 < row["tok_s_min"] <= row["tok_s"] <= row["tok_s_max"] for row in told["decode"])
    assert undocumented(told) == set(), "docs/measuring.md"


def test_serve_announces_the_demo_model(process: Callable[..., Any], own_home: Path) -> None:
    run = process("serve", "--port", "0", "--no-browser")
    first, second = (run.stdout.readline().decode() for _ in range(2))
    assert first.startswith("model    built-in demo model")
    assert second.startswith("better   SmolLM3-3B: ") and "(1.92 GB, 3 minutes at 100 Mbit/s, to " in second
    assert str(registry.hub_cache()) in second and "`notso pull`" in second
    url = next(line for line in run.stdout if line.startswith(b"open ")).decode().split()[1]
    with urllib.request.urlopen(url, timeout=60) as page:
        assert page.status == 200
    run.terminate()
    run.communicate(timeout=60)

    assert run.returncode == 0


def test_server_with_demo_model_suggests_better_model(own_home: Path) -> None:
    summary = serve.startup_summary(None, EngineConfig())
    first, second = summary.lines[:2]
    assert summary.facts["is_demo"] and first.startswith("model    built-in demo model")
    assert second.startswith("better   SmolLM3-3B: ") and "(1.92 GB, 3 minutes at 100 Mbit/s, to " in second
    assert str(registry.hub_cache()) in second and "`notso pull`" in second


def test_command_without_arguments_starts_the_server(
    process: Callable[..., Any], own_home: Path, tmp_path: Path
) -> None:
    """Environment variables and the configuration file apply, too."""
    run = process(env={**os.environ, "NOTSO_PORT": "0", "NOTSO_DATA_DIR": str(tmp_path), "DISPLAY": ""})
    url = next(line for line in run.stdout if line.startswith(b"open ")).decode().split()[1]
    with urllib.request.urlopen(url, timeout=60) as page:
        assert page.status == 200
    run.terminate()
    run.communicate(timeout=60)

    assert run.returncode == 0
