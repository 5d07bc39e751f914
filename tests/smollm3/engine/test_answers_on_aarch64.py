"""Twenty answers of the demo model have the same fingerprints on this machine and on AArch64 emulated by qemu."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import aarch64
import pytest
from aarch64 import DOTPROD, I8MM

FAMILIES = {DOTPROD: "neon", I8MM: "neon_i8mm"}

# Print the bits of a prompt's logits in every cache format, then greedy and seeded answers of conversations.
ASK = """
import json
from golden.prompts import CONVERSATIONS, DATE
from notso import Engine, RequestOptions, SamplingParams
from notso.qtensor.backends.cpu.kernel_choice import kernels
from notso.qtensor.formats import KV_FORMATS
from notso.smollm3.diagnostics.verification import answer_fingerprint, model_fingerprint

models = {}
for kv in KV_FORMATS:
    with Engine.load(kv=kv, threads=2) as engine:
        models[kv] = model_fingerprint(engine)
answers, written = [], 0
with Engine.load(threads=2) as engine:
    for number, asked in enumerate(CONVERSATIONS):
        params = SamplingParams(temperature=0.0 if number % 2 else 0.7, seed=number, max_tokens=200)
        options = RequestOptions(thinking=asked.thinking, tools=asked.tools or None, date=DATE)
        texts = {"reasoning": "", "text": ""}
        for event in engine.generate(asked.messages, params, options):
            if event.kind in texts:
                texts[event.kind] += event.text
            if event.kind == "usage":
                written += event.usage.completion_tokens
        answers.append(answer_fingerprint(*texts.values()))
print(json.dumps({"family": kernels(), "models": models, "answers": answers, "written": written}))
"""

pytestmark = [
    pytest.mark.long("native"),
    pytest.mark.skipif(bool(aarch64.python_missing()), reason=aarch64.python_missing() or "-"),
    pytest.mark.timeout(3600),
]


def told(run: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def here() -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(aarch64.ROOT / "tests")}
    return told(
        subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, env=environment, timeout=600)
    )


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("aarch64")
    aarch64.install(to)
    return to


@pytest.mark.parametrize("cpu", FAMILIES)
def test_emulated_aarch64_gives_identical_answers(cpu: str, package: Path, here: dict[str, Any]) -> None:
    there = told(aarch64.run_python(cpu, package, "-c", ASK))
    assert there["family"] == FAMILIES[cpu] != here["family"]
    assert len(here["answers"]) == 20 and len(set(here["answers"])) > 10 and here["written"] > 500
    for name in ("models", "answers", "written"):
        assert there[name] == here[name]
    print(f"{there['family']}: {there['written']} tokens in 20 answers, as {here['family']}")
