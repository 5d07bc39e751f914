"""`notso pull` and `notso list` with a fake Hugging Face Hub."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from notso.smollm3.hub import registry

Run = Callable[..., Any]


def test_pull_prints_the_file_path_to_stdout(fake_hub: Any, official_file: registry.KnownFile, notso: Run) -> None:
    result = notso("pull", "small")

    assert result.code == 0
    assert Path(result.out.strip()).read_bytes() == fake_hub.content
    assert "SmolLM3-Small-Q4_K_M.gguf, 3.0 MB, to" in result.err
    assert "SHA-256 verified" in result.err
    assert "already downloaded" in notso("pull", "small:Q4_K_M").err


def test_pull_json_reports_the_download(fake_hub: Any, official_file: registry.KnownFile, notso: Run) -> None:
    result = notso("pull", "Q4_K_M", "--json")

    told = json.loads(result.out)
    assert told["sha256"] == official_file.sha256
    assert (told["downloaded_bytes"], told["resumed_at_bytes"]) == (3_000_000, 0)
    last = json.loads(result.err.splitlines()[-1])
    assert last == {"progress": "downloading", "done": 3_000_000, "total": 3_000_000}


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        ({"statuses": [404]}, "404"),
        ({"offered_size": 5}, "expected 3,000,000 bytes, got 5"),
        ({"extra": b"x"}, "longer than the published"),
    ],
)
def test_failed_download_exits_with_code_7(
    fake_hub: Any, official_file: registry.KnownFile, notso: Run, knobs: dict[str, Any], told: str
) -> None:
    for name, value in knobs.items():
        setattr(fake_hub, name, value)

    result = notso("pull", "Q4_K_M")

    assert result.code == 7
    assert result.out == ""
    assert told in result.err.splitlines()[-1]
    assert registry.find_local(official_file) is None


def test_offline_option_sends_no_requests(fake_hub: Any, official_file: registry.KnownFile, notso: Run) -> None:
    result = notso("pull", "Q4_K_M", "--offline")

    assert result.code == 7
    assert result.err == ("notso: SmolLM3-Small-Q4_K_M.gguf is not on this machine, and the network is disabled\n")
    assert fake_hub.requests == []


def test_interrupted_download_is_resumed(
    fake_hub: Any, official_file: registry.KnownFile, process: Callable[..., Any], notso: Run
) -> None:
    fake_hub.trickles_from = 600_000
    setup = f"from notso.smollm3.hub import registry as hub\nhub.KNOWN_FILES = (hub.{official_file!r},)"
    part = registry.blob_path(official_file).with_name(f"{official_file.sha256}.incomplete")
    run = process("pull", "Q4_K_M", setup=setup)
    deadline = time.monotonic() + 60
    while not (part.exists() and part.stat().st_size > 500_000):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 130
    assert out == b""
    assert err.endswith(b"Stopped. Run the same command again to continue.\n")
    assert fake_hub.requests == [("HEAD", None), ("GET", None)]  # there are no other requests
    kept = part.stat().st_size
    fake_hub.trickles_from = None

    told = json.loads(notso("pull", "Q4_K_M", "--json").out)

    assert 0 < told["resumed_at_bytes"] == kept
    assert Path(told["path"]).read_bytes() == fake_hub.content


def test_list_shows_downloaded_and_local_models(
    fake_hub: Any, official_file: registry.KnownFile, notso: Run, tmp_path: Path
) -> None:
    assert "`notso pull`" in notso("list").err
    notso("pull", "Q4_K_M")
    (tmp_path / "mine-Q8_0.gguf").write_bytes(b"GGUF")

    result = notso("list", str(tmp_path))
    lines = [line.split() for line in result.out.splitlines() if "demo" not in line]
    assert lines[0] == ["name", "type", "size", "where", "verified", "path"]
    assert lines[1][:6] == ["small:Q4_K_M", "Q4_K_M", "3.0", "MB", "cache", "yes"]
    assert lines[2][:7] == ["mine-Q8_0", "Q8_0", "4", "bytes", "folder", "no", str(tmp_path / "mine-Q8_0.gguf")]
    assert result.err == ""

    models = [model for model in json.loads(notso("list", str(tmp_path), "--json").out) if model["where"] != "built in"]
    assert [(model["name"], model["verified"]) for model in models] == [("small:Q4_K_M", "yes"), ("mine-Q8_0", "no")]
    assert models[0]["size_bytes"] == 3_000_000

    (tmp_path / "bad.gguf").symlink_to("a" * 300)
    named_twice = notso("list", str(tmp_path), f"{tmp_path}/../{tmp_path.name}")
    assert named_twice.err == f"{tmp_path}/bad.gguf is not listed, because it is not a readable file.\n"
    assert named_twice.out == result.out
