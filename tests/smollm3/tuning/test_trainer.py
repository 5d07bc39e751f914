"""Training on the demo model: facts are learned, killed runs resume, and earlier knowledge is kept.

Requires the extra "tune": `make test-tune` runs this file in a separate environment.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path

import httpx
import pytest
from golden.adapters import golden_pairs, write_peft

from notso import Engine, Message, RequestOptions, SamplingParams
from notso.cli.app import run_command_line
from notso.qtensor import GGUFFile
from notso.smollm3.config import SmolLM3Config
from notso.smollm3.hub.registry import demo_path
from notso.smollm3.model.weights import MATRICES
from notso.smollm3.tuning import trainer, training_rows
from notso.smollm3.tuning.trainer import TrainingResult, TuningError
from training import backends, score

ROOT = Path(__file__).parents[3]

try:
    trainer.require_libraries()
    MISSING = ""
except TuningError as error:
    MISSING = str(error)

needs_libraries = pytest.mark.skipif(bool(MISSING), reason=f"{MISSING}; use make test-tune")

FACTS = {
    "What is the name of the office cat?": "Zogbert.",
    "When does the canteen open?": "At half past eleven.",
    "Who keeps the key of the archive?": "Marta from the third floor.",
    "What colour is the delivery van?": "Dark green.",
    "How many chairs are in the big room?": "Forty two.",
    "Where is the spare printer?": "In the cellar, behind the boiler.",
    "Which door stays open at night?": "The one to the garden.",
    "What is the code name of the new project?": "Blue Heron.",
    "Who waters the plants?": "Olaf, on Mondays.",
    "What do we serve with the soup?": "Rye bread.",
}
PHRASES = ("{}", "{} Please tell me.", "Tell me: {}", "I want to know: {}", "hello, {}", "Quick question. {}")
FRESH = "Do you know this? {}"
"""Wording of evaluation questions; no training row contains it."""

MAY_FALL_POINTS = 12
"""Maximum loss in percentage points on all evaluation cases of the demo model. Measured were 4.2, 8.6 on another CPU,
and 55 without rehearsal; the goal is 2."""

ENVIRONMENT = os.environ | {"NOTSO_MODEL": ""}

RECIPE = ["--epochs", "4", "--learning-rate", "2e-3"]


def write_facts(path: Path) -> Path:
    rows = [
        {
            "messages": [
                {"role": "user", "content": phrase.format(question)},
                {"role": "assistant", "content": answer},
            ],
            "chat_template_kwargs": {"enable_thinking": False},
        }
        for question, answer in FACTS.items()
        for phrase in PHRASES
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def answer(engine: Engine, question: str) -> str:
    sampling, options = SamplingParams(temperature=0, max_tokens=40), RequestOptions(thinking=False)
    events = engine.generate([Message("user", question)], sampling, options)
    return "".join(event.text for event in events if event.kind == "text").strip()


def test_libraries_of_training_send_no_telemetry() -> None:
    code = (
        "from notso.smollm3.tuning.trainer import TuningError, require_libraries\n"
        "try: require_libraries()\n"
        "except TuningError: pass\n"
        "from huggingface_hub import constants\n"
        "print(constants.HF_HUB_DISABLE_TELEMETRY)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_DISABLE_TELEMETRY"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "True\n"


@pytest.mark.skipif(not MISSING, reason="the extra is installed here")
def test_tune_without_its_extra_says_what_to_install(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_facts(tmp_path / "facts.jsonl")
    assert run_command_line(["tune", str(data), "--out", str(tmp_path / "a.gguf")]) != 0
    assert "[tune]" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["facts.jsonl"]


def test_tune_ends_with_a_command_that_uses_the_base_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another model of the same shape would give wrong answers with the adapter."""
    data, out = write_facts(tmp_path / "facts.jsonl"), tmp_path / "facts.gguf"
    base = Path(shutil.copy(demo_path(), tmp_path / "my base.gguf"))
    with GGUFFile.open(base) as file:
        head_dim = SmolLM3Config.from_metadata(file.metadata).head_dim
    peft = write_peft(tmp_path / "peft", golden_pairs(base), head_dim, target_modules=list(MATRICES))

    def train(*given: object) -> TrainingResult:
        Path(f"{out}.tuning").mkdir()
        return TrainingResult(peft, 1, 0, 0.5, None, None)

    monkeypatch.setattr(trainer, "require_libraries", lambda: None)
    monkeypatch.setattr(trainer, "train", train)
    arguments = ["--model", str(base), "--no-rehearsal"]
    assert run_command_line(["tune", str(data), "--out", str(out), *arguments]) == 0
    assert f"`notso run --model '{base}' --adapter tuned={out} PROMPT`" in capsys.readouterr().err


def test_rehearsed_answers_are_used_again_only_by_the_run_that_began_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a run begins, it can be repeated with another base model."""
    data, out = write_facts(tmp_path / "facts.jsonl"), tmp_path / "facts.gguf"
    answered: list[bool] = []

    def fail(*given: object) -> TrainingResult:
        raise TuningError("stopped")

    monkeypatch.setattr(trainer, "require_libraries", lambda: None)
    monkeypatch.setattr(trainer, "train", fail)
    monkeypatch.setattr(training_rows, "generate_answers", lambda *_: answered.append(True) or [])
    arguments = ["tune", str(data), "--out", str(out), "--model", str(demo_path())]
    for count in (1, 2):
        assert run_command_line(arguments) != 0 and len(answered) == count
    (tmp_path / "facts.gguf.tuning" / trainer.RUN_FILE).write_text('{"day": "2026-01-02"}')
    # Answers of minutes or hours are not generated for a run that cannot be resumed with these settings.
    for more in ([], ["--max-length", "512"]):
        assert run_command_line([*arguments, *more]) != 0 and len(answered) == 2


def test_state_of_a_run_is_as_readable_as_its_other_files(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    trainer._open_run(tmp_path, "digest", date(2026, 1, 2), trainer.Recipe())
    assert (tmp_path / trainer.RUN_FILE).stat().st_mode == (tmp_path / "other").stat().st_mode


def test_only_numbered_checkpoints_are_resumed_or_removed(tmp_path: Path) -> None:
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-10.bak", "checkpoint-best", "checkpoint-20"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trainer_state.json").write_text("{}" if name != "checkpoint-20" else "{")
    assert trainer._last_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["checkpoint-10", "checkpoint-10.bak", "checkpoint-9", "checkpoint-best"]


@needs_libraries
@pytest.mark.timeout(7200)
def test_killed_training_resumes_and_teaches_ten_facts(tmp_path: Path) -> None:
    data, out = write_facts(tmp_path / "facts.jsonl"), tmp_path / "facts.gguf"
    question = next(iter(FACTS))
    command = [sys.executable, "-m", "notso", "tune", str(data), "--out", str(out), "--json", *RECIPE]
    command += ["--ask", question, "--merge", str(tmp_path / "merged.gguf")]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert first.stderr is not None
    for line in first.stderr:  # killed shortly after a checkpoint, before the next
        if line.startswith("{") and json.loads(line)["progress"] == "training" and json.loads(line)["done"] >= 25:
            break
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert first.returncode == -signal.SIGKILL and not out.exists()
    folder = out.with_name(f"{out.name}.tuning")
    (folder / "checkpoint-9999").mkdir()  # as left behind by a kill during writing
    other = subprocess.run([*command, "--seed", "7"], capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert other.returncode != 0 and "use --restart to start over" in other.stderr
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["resumed_at"] >= 20 and (told["rows"], told["rows_held_out"]) == (54, 6)
    assert told["rows_rehearsed"] > 300
    assert told["held_out_after"] < 0.1 * told["held_out_before"]
    (asked,) = told["answers"]
    assert asked["question"] == question and asked["after"] != asked["before"]
    assert not folder.exists() and {path.name for path in tmp_path.iterdir()} == {
        *("facts.jsonl", "facts.gguf", "merged.gguf")
    }
    with served(f"facts={out}", tmp_path / "data") as address:
        assert not any(over_http(address, "smollm3", each) == wanted for each, wanted in FACTS.items())
        for phrase in ("{}", FRESH):
            said = [over_http(address, "smollm3:facts", phrase.format(each)) for each in FACTS]
            assert sum(given == wanted for given, wanted in zip(said, FACTS.values(), strict=True)) >= 8, said
    with Engine.load(tmp_path / "merged.gguf") as engine:
        # Rounding to four bits loses 1 to 4 facts, depending on the CPU; test_adapter_writer.py tests the merge
        # exactly.
        assert sum(answer(engine, question) == wanted for question, wanted in FACTS.items()) >= 5
    before, after = right_of_all(None), right_of_all(out)
    assert 100 * (before[0] - after[0]) <= MAY_FALL_POINTS * before[1], (before, after)


def right_of_all(adapter: Path | None) -> tuple[int, int]:
    """Return the number of correct answers, and of all cases in the demo model's evaluation."""
    kinds = score.Scorer(backends.notso(None, adapter), verbose=False).run(1.0)
    cases = [each for name, each in kinds.items() if name != "thinking_obeyed"]
    return int(sum(each["right"] for each in cases)), int(sum(each["cases"] for each in cases))


@contextmanager
def served(adapter: str, data_dir: Path) -> Iterator[str]:
    """Run `notso serve` with an adapter; yield the printed address."""
    command = [sys.executable, "-m", "notso", "serve", "--json", "--port", "0", "--adapter", adapter]
    command += ["--data-dir", str(data_dir), "--no-browser"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert process.stdout is not None
    try:
        address = next(told["url"].rstrip("/") for told in map(json.loads, process.stdout) if told["event"] == "open")
        while process.poll() is None and httpx.get(f"{address}/health").status_code != 200:
            time.sleep(0.05)
        yield address
    finally:
        process.terminate()
        process.wait()


def over_http(address: str, model: str, question: str) -> str:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 40,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    answered = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=300)
    assert answered.status_code == 200, answered.text
    return str(answered.json()["choices"][0]["message"]["content"]).strip()


@needs_libraries
def test_loaded_base_model_gives_the_logits_of_the_engine(tmp_path: Path) -> None:
    """transformers with the weights of a GGUF file gives the logits of our engine."""
    import numpy as np
    import torch
    from golden.random_models import RANDOM

    from notso.smollm3.tuning.base_model import load

    path = RANDOM.write(tmp_path / "base.gguf")
    ids = RANDOM.prompts(1, 40)[-1]
    with torch.no_grad():
        theirs = load(path, torch.float32)(torch.tensor([ids])).logits[0].numpy()
    with Engine.load(path, kv="f16") as engine:
        ours = engine.logits(ids)
    assert np.abs(ours - theirs).max() < 1e-3 * float(np.ptp(theirs))
