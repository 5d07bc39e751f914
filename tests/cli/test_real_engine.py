"""Commands that run, read or write model files, with a real engine and a small model with random weights."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from notso import Engine
from notso.smollm3.hub import registry
from notso.system.memory import MemoryLimit

Run = Callable[..., Any]
MEASURING = Path(__file__).parents[2] / "docs" / "measuring.md"


def damaged(model: Path, folder: Path, at: int, value: bytes) -> Path:
    data = bytearray(model.read_bytes())
    data[at : at + len(value)] = value
    path = folder / "damaged.gguf"
    path.write_bytes(data)
    return path


def undocumented(told: dict[str, Any]) -> set[str]:
    """Return the keys of a benchmark's results that docs/measuring.md lacks."""
    rows = [row for value in told.values() for row in (value if isinstance(value, list) else [value])]
    keys = set(told).union(
        *(row for row in rows if isinstance(row, dict) and row not in (told["machine"], told["model"]))
    )
    written = set(re.findall(r"`(\w+)`", MEASURING.read_text().split("## Keys")[1].split("\n## ")[0]))
    return {key.removesuffix("_min").removesuffix("_max") for key in keys} - written


@pytest.fixture
def answer(notso: Run, small_model: Path) -> Callable[..., dict[str, Any]]:
    def ask(*options: str) -> dict[str, Any]:
        result = notso("run", "-m", str(small_model), "--json", "-n", "12", "--threads", "1", "hi", *options)
        told: dict[str, Any] = json.loads(result.out)
        assert result.code == {"length": 8, "stop": 0}[told["finish_reason"]], result.err
        return told

    return ask


def test_run_reports_token_counts_and_timings(answer: Callable[..., dict[str, Any]]) -> None:
    told = answer()

    # user turn "hi" and the beginning of the assistant's turn, with one token per byte and per special token
    assert told["usage"]["prompt_tokens"] == 1 + 7 + 1 + 1 + 1 + 10
    assert told["usage"]["completion_tokens"] == 12
    assert told["finish_reason"] == "length"
    assert told["timings"]["tokens_per_second"] > 0
    assert told["model"] == "Random weights in the shapes of SmolLM3"
    assert told["demo"] is False


def test_the_same_seed_gives_the_same_answer(answer: Callable[..., dict[str, Any]]) -> None:
    drawn = answer()
    again = answer("--seed", str(drawn["seed"]))
    other = answer("--seed", "1")

    assert (again["text"], again["reasoning"]) == (drawn["text"], drawn["reasoning"])
    assert (other["text"], other["reasoning"]) != (drawn["text"], drawn["reasoning"])


def test_kernels_and_threads_do_not_change_the_answer(
    answer: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from notso.qtensor.backends.cpu import kernel_choice

    best = kernel_choice.available_kernels()[0]
    told = []
    for kernels, threads in (("generic", "1"), (best, "2"), (best, "1")):  # the best is last, because it stays selected
        monkeypatch.setenv("NOTSO_KERNELS", kernels)
        found = answer("--seed", "4", "--threads", threads)
        told.append((found["text"], found["reasoning"]))

    assert len(set(told)) == 1


def test_closing_stdout_ends_the_run_with_sigpipe_code(process: Callable[..., Any], small_model: Path) -> None:
    run = process("run", "-m", str(small_model), "--threads", "1", "-n", "3000", "--seed", "1", "--no-think", "hi")
    assert run.stdout.read(1)
    run.stdout.close()
    run.stdin.close()

    assert run.wait(60) == 141
    assert b"Error" not in run.stderr.read()
    run.stderr.close()


def test_unknown_kernel_family_is_a_usage_error(notso: Run, small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTSO_KERNELS", "mmx")
    result = notso("run", "-m", str(small_model), "hi")

    assert result.code == 2
    assert "generic" in result.err  # the choices are listed


def test_chat_keeps_earlier_turns_in_context(notso: Run, small_model: Path) -> None:
    result = notso("chat", "-m", str(small_model), "-n", "4", "--no-think", stdin="hi\nagain\n/status\n")

    assert result.code == 0
    assert "not thinking | temperature 0.6" in result.err
    used = int(result.err.rpartition("0.6 | ")[2].split()[0])
    assert used > 45  # two questions and the answer between them


def test_prompt_longer_than_context_is_refused(notso: Run, small_model: Path) -> None:
    result = notso("run", "-m", str(small_model), "--context", "64", "x" * 100)

    assert result.code == 1
    assert "the context is 64. Shorten the prompt" in result.err


@pytest.mark.parametrize("verb", ["run", "inspect", "verify", "bench", "serve"])
def test_invalid_model_file_exits_with_code_3(notso: Run, tmp_path: Path, verb: str) -> None:
    files = {"empty.gguf": b"", "text.gguf": b"this is no model", "cut.gguf": b"GGUF\x03\x00\x00\x00"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    option = ["--model"] if verb in ("run", "serve") else []
    for name in [*files, "missing.gguf"]:
        result = notso(verb, *option, str(tmp_path / name), *(["x"] if verb == "run" else []))

        assert result.code == 3, (name, result.err)
        assert result.out == ""
        assert result.err.startswith("notso: ")
        assert result.err.count("\n") == 1


def test_unsupported_architecture_exits_with_code_3(notso: Run, small_model: Path, tmp_path: Path) -> None:
    at = small_model.read_bytes().index(b"smollm3")
    other = damaged(small_model, tmp_path, at, b"mistral")

    result = notso("run", "-m", str(other), "hi")
    assert result.code == 3
    assert "mistral" in result.err

    result = notso("inspect", str(other))
    assert result.code == 3
    assert "cannot be run" in result.err
    assert "tensors by type" in result.out  # what can be read is still shown


def test_context_that_exceeds_memory_exits_with_code_4(
    notso: Run, small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from notso.qtensor import CPU

    little = MemoryLimit("the control group", 264 << 20)
    monkeypatch.setattr(CPU, "memory", lambda *_, **__: little)
    result = notso("run", "-m", str(small_model), "--context", "131072", "hi")

    assert result.code == 4
    assert "the control group leaves 264 MiB" in result.err
    assert "tokens would fit" in result.err


def test_kv_option_selects_cache_format_and_rejects_unknown_ones(notso: Run, small_model: Path) -> None:
    status = notso("chat", "-m", str(small_model), "--kv", "f16", stdin="/status\n")
    assert "KV cache f16, " in status.err

    assert notso("run", "-m", str(small_model), "--kv", "q8_0", "hi").code == 2


def test_inspect_shows_layers_types_and_memory(notso: Run, small_model: Path) -> None:
    text = notso("inspect", str(small_model), "--tensors").out
    assert "layers without RoPE (NoPE): 3\n" in text
    assert "blk.3.ffn_down.weight" in text

    told = json.loads(notso("inspect", str(small_model), "--json").out)
    assert "tensors" not in told
    assert {total["format"]: total["tensors"] for total in told["formats"]} == {"Q4_K": 24, "Q6_K": 5, "F32": 9}
    assert told["run"]["nope_layers"] == [3]
    assert told["run"]["kv_values_per_token"] == 4 * 2 * 64
    assert told["run"]["cache"][0]["bytes_per_token"] == 4 * 2 * 64 * 2
    assert len(json.loads(notso("inspect", str(small_model), "--json", "--tensors").out)["tensors"]) == 38


def test_verify_multiplies_every_quantized_tensor(notso: Run, small_model: Path) -> None:
    result = notso("verify", str(small_model))
    assert result.code == 0
    assert result.out.endswith("\nok\n")
    assert "not a published file" in result.out

    told = json.loads(notso("verify", str(small_model), "--json").out)
    assert told["ok"] is True
    assert told["sha256"] == registry.sha256_of(small_model)
    multiplied = [check for check in told["tensors"] if check["worst_error"] is not None]
    assert len(multiplied) == 29
    assert all(0 < check["worst_error"] <= check["tolerance"] for check in multiplied)


def test_verify_detects_an_invalid_scale(notso: Run, small_model: Path, tmp_path: Path) -> None:
    told = json.loads(notso("inspect", str(small_model), "--json", "--tensors").out)
    assert told["tensors"][0]["name"] == "token_embd.weight"
    # The scale of a Q6_K block is in its last two of 210 bytes. Replace it with NaN.
    broken = damaged(small_model, tmp_path, told["data_offset"] + 208, b"\xff\x7f")

    result = notso("verify", str(broken), "--tensors")
    assert result.code == 3
    assert "token_embd.weight: row 0 has a value that is NaN" in result.err


def test_verify_compares_logits_with_a_golden_file(notso: Run, small_model: Path, tmp_path: Path) -> None:
    with Engine.load(small_model, kv="f16") as engine:
        config, right = engine.config, engine.logits([5, 6, 7])
    shape = {name: getattr(config, name) for name in ("hidden_size", "vocab_size")} | {
        "layers": config.num_hidden_layers
    }
    for name, values in (("right", right), ("wrong", -right)):
        case = {"ids": [5, 6, 7], "logits": [{"position": 2, "values": values[2].tolist()}]}
        given = {"name": "small\x1b[31m", "shape": shape, "cases": [case]}
        (tmp_path / f"{name}.json").write_text(json.dumps(given))
    result = notso("verify", str(small_model), "--golden-file", str(tmp_path / "right.json"))
    assert result.code == 0 and result.out.endswith("\nright\n") and "\x1b" not in result.out
    result = notso("verify", str(small_model), "--golden-file", str(tmp_path / "wrong.json"), "--json")
    assert result.code == 3 and json.loads(result.out)["ok"] is False
    result = notso("verify", str(small_model), "--golden")
    assert result.code == 2 and "belong to another model" in result.err


def test_perplexity_reports_divergence_from_other_model(notso: Run, small_model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some words to be foretold" * 3)
    told = notso("perplexity", str(small_model), str(text), "--window", "16", "--kl", str(small_model), "--json")
    assert told.code == 0, told.err
    found = json.loads(told.out)
    assert found["kl"]["value"] == 0 and found["model"] == found["base"] and found["model"]["tokens"] == 4 * 7


def test_perplexity_reports_score_and_divergence(notso: Run, small_model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some words to be foretold, again and again. " * 20)
    told = notso("perplexity", str(small_model), str(text), "--window", "32")
    assert told.code == 0 and re.fullmatch(r"perplexity  [\d.]+ ± [\d.]+ \([\d,]+ tokens scored\)\n", told.out)
    told = notso("perplexity", str(small_model), str(text), "--window", "32", "--kl", str(small_model), "--json")
    assert told.code == 0 and json.loads(told.out)["kl"]["value"] == 0
    (tmp_path / "bytes").write_bytes(b"a\xff")
    for bad, words in ((tmp_path / "bytes", "not UTF-8 text (byte 1)"), (tmp_path / "absent", "No such file")):
        result = notso("perplexity", str(small_model), str(bad))
        assert result.code == 2 and words in result.err and result.err.count("\n") == 1


def test_verify_recognizes_a_published_file_and_its_damaged_copy(
    notso: Run, small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = registry.KnownFile(
        "small:Q4_K_M", "a/b", "0" * 40, "small.gguf", small_model.stat().st_size, registry.sha256_of(small_model)
    )
    monkeypatch.setattr(registry, "KNOWN_FILES", (published,))
    assert "the published small:Q4_K_M" in notso("verify", str(small_model)).out
    assert json.loads(notso("list", str(small_model.parent), "--json").out)[-1]["verified"] == "yes"

    # A flipped bit in the weights leaves the file valid, so only the hash detects it.
    last = small_model.stat().st_size - 2000
    copy = damaged(small_model, tmp_path, last, bytes([small_model.read_bytes()[last] ^ 1]))
    result = notso("verify", str(copy.rename(tmp_path / "Small (1).gguf")))
    assert result.code == 3
    assert "Same size as small:Q4_K_M, but different content: run `notso pull small:Q4_K_M --force`" in result.err
    # An adapter merged into the published file does not change the size.
    result = notso("verify", str((tmp_path / "Small (1).gguf").rename(tmp_path / "Small-tuned.gguf")))
    assert result.code == 0 and "not a published file" in result.out and "Same size" not in result.err


def test_synth_creates_a_reproducible_model_that_runs(notso: Run, small_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "made.gguf"
    sizes = "--layers 2 --hidden 512 --ffn 768 --heads 8 --kv 2 --vocab 400 --seed 3"
    arguments = ["synth", str(out), *sizes.split(), "--tokenizer", str(small_model)]
    result = notso(*arguments)
    assert (result.code, result.out) == (0, f"{out}\n")
    first = out.read_bytes()

    result = notso(*arguments)
    assert result.code == 2
    assert "use --force to overwrite it" in result.err
    assert notso(*arguments, "--force").code == 0
    assert out.read_bytes() == first
    assert notso("verify", str(out)).code == 0
    assert notso("run", "-m", str(out), "-n", "3", "hi").code == 8


@pytest.mark.parametrize("sizes", ["--hidden 300", "--heads 7", "--kv 3", "--vocab 257", "--layers 100000"])
def test_synth_refuses_invalid_sizes(notso: Run, small_model: Path, tmp_path: Path, sizes: str) -> None:
    out = tmp_path / "made.gguf"
    base = "--layers 2 --hidden 512 --ffn 768 --heads 8 --kv 2 --vocab 400"
    result = notso("synth", str(out), *base.split(), *sizes.split(), "--tokenizer", str(small_model))

    assert result.code == 2
    assert result.err.count("\n") == 1
    assert not out.exists()


def test_bench_reports_rates_and_machine_as_documented(
    notso: Run, small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from notso.smollm3.diagnostics import benchmark

    probe_buffer = benchmark.probe_buffer
    monkeypatch.setattr(benchmark, "probe_buffer", lambda size_bytes: probe_buffer(size_bytes // 64))
    options = ["--prefill", "40", "--depth", "0", "--depth", "50", "--decode", "6", "--repeat", "2"]
    result = notso("bench", str(small_model), "--json", *options)

    assert result.code == 0, result.err
    told = json.loads(result.out)
    assert {"machine", "bandwidth_gb_s", "load_s", "prefill", "decode", "batch", "memory"} <= set(told)
    assert [(row["tokens"], row["depth"]) for row in told["prefill"]] == [(40, 0)]
    assert [row["depth"] for row in told["decode"]] == [0, 50]
    for row in told["prefill"] + told["decode"]:
        assert 0 < row["tok_s_min"] <= row["tok_s"] <= row["tok_s_max"]
    assert all(row["roofline"] > 0 for row in told["decode"])
    assert told["memory"]["rss_mb"] > 10
    assert told["machine"]["cpu"]
    assert json.loads(result.err.splitlines()[-1])["progress"] == "done"
    assert undocumented(told) == set(), "docs/measuring.md"

    shared = tmp_path / "mine.json"
    text = notso("bench", str(small_model), *options, "--share", str(shared)).out
    given = json.loads(shared.read_text())
    assert given["fingerprint"] == told["fingerprint"] and given.keys() == told.keys()
    assert f"fingerprint {told['fingerprint']} ({told['model']['kv_format']} cache)" in text
    assert "| prefill 40, tok/s" in text
    assert "| decode at 50, tok/s" in text


def test_doctor_reports_problems(notso: Run, small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTSO_MODEL", str(small_model))
    told = {line["subject"]: line for line in json.loads(notso("doctor", "--port", "0", "--json").out)}
    assert set(told) == {
        "python", "cpu", "kernels", "gpu", "memory", "pages", "model", "disk", "data", "port", "sqlite", "network",
        "plugins", "postgresql", "confinement", "versions",
    }  # fmt: skip
    assert told["kernels"]["status"] == "ok"
    assert "fastest kernels for this CPU" in told["kernels"]["message"]
    assert str(small_model) in told["model"]["message"]

    monkeypatch.setenv("NOTSO_KERNELS", "mmx")
    monkeypatch.setenv("NOTSO_MODEL", "missing.gguf")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("NOTSO_DATA_DIR", str(small_model))
    result = notso("doctor", "--port", "0")
    assert result.code == 1
    lines = result.out.splitlines()
    assert any(line.startswith("fail  kernels: ") and "unset NOTSO_KERNELS" in line for line in lines)
    assert any(
        line.startswith("fail  model: missing.gguf is neither a model file nor the name of an installed model")
        for line in lines
    )
    assert any(line.startswith("fail  data: ") and "set NOTSO_DATA_DIR" in line for line in lines)
    assert any("model downloads are disabled (HF_HUB_OFFLINE)" in line for line in lines)


def test_doctor_fails_for_an_invalid_model_file(notso: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.gguf").write_text("no model\n")
    monkeypatch.setenv("NOTSO_MODEL", str(tmp_path / "text.gguf"))
    told = {line["subject"]: line for line in json.loads(notso("doctor", "--port", "0", "--json").out)}
    assert told["model"]["status"] == "fail" and "cannot be used" in told["model"]["message"]


def test_doctor_warns_about_a_port_in_use(notso: Run) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        told = json.loads(notso("doctor", "--port", str(taken.getsockname()[1]), "--json").out)
    (port,) = [line for line in told if line["subject"] == "port"]
    assert port["status"] == "warn"
    assert "--port" in port["fix"]
