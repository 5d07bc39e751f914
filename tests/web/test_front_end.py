"""A front end computes nothing: it forwards to a remote engine and needs no numerical library installed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted_engine import DEFAULT_ANSWER, ScriptedEngine

from notso.web.values.ids import new_id

KEY = "a key for front ends only"
NOT_INSTALLED = (
    *("numpy", "tokenizers", "llguidance", "huggingface_hub", "hf_xet", "httpx2", "prompt_toolkit"),
    *("notso.qtensor._native", "notso.qtensor.backends", "notso.smollm3.engine"),
)
PROGRAM = f"""
import sys

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if any(name == each or name.startswith(each + ".") for each in {NOT_INSTALLED}):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, NotInstalled())
from notso.cli import main
sys.exit(main())
"""
MOST_RESIDENT_BYTES = 130_000_000
"""The measured size is 76 MB. A front end that loads the libraries for inference needs more than twice as much."""


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc to measure memory")
def test_front_end_serves_pages_and_api_without_inference_libraries(start: Callable[..., Any], tmp_path: Path) -> None:
    engine = start(ScriptedEngine(), engine_api=True, engine_key=KEY).ready()
    arguments = ["serve", "--json", "--no-browser", "--port", "0", "--engine-url", engine.address]
    environment = os.environ | {"NOTSO_ENGINE_KEY": KEY, "NOTSO_DATA_DIR": str(tmp_path / "front")}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments], env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        starting, opened = json.loads(process.stdout.readline()), json.loads(process.stdout.readline())
        assert starting == {"event": "starting", "engine": engine.address}
        with httpx.Client(base_url=opened["url"], timeout=60) as client:
            engine.wait(lambda: client.get("/health").status_code == 200)
            said = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hello"}]})
            assert said.json()["choices"][0]["message"]["content"] == DEFAULT_ANSWER
            chat = client.post("/chats", data={"text": "Hello", "key": new_id()}).headers["location"]
            engine.wait(lambda: "I say what my <strong>script</strong> says" in client.get(chat).text)
            for page in ("/models", "/settings", "/metrics", "/v1/models", "/openapi.json"):
                assert client.get(page).status_code == 200, page
        held = re.search(r"^VmRSS:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text(), re.MULTILINE)
        assert held is not None and int(held[1]) * 1024 < MOST_RESIDENT_BYTES
    finally:
        process.terminate()
        assert process.wait(60) == 0


def test_measurement_of_replicas_needs_valkey_or_a_front_end() -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "replica_overhead.py"
    done = subprocess.run([sys.executable, str(script), "--rounds", "1"], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and "--front-end" in done.stderr.splitlines()[-1]
