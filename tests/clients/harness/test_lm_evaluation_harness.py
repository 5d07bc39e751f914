"""lm-evaluation-harness with its defaults gets the same results over HTTP as the engine gives directly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DIRECT = Path(__file__).with_name("direct_answers.py")
TIMEOUT_S = 600.0

ROWS: list[dict[str, Any]] = [
    {"text": "1, 2, 3,", "choices": ["4,", "a caf\u00e9 \U0001f600", "Rome, which is older"]},
    {"text": "What is 12 * 12?", "choices": ["144", "12", "one hundred and forty-four"]},
    {"text": "<|im_start|>user\nHello<|im_end|>\n", "choices": ["Hello", "<|im_end|>"]},
    {"text": "", "choices": ["Once upon a time", "The"]},
]
"""The choices have one or several tokens, characters of several tokens, or control tokens; the last context is
empty."""

STOPS = ["\n\n", "Question:"]
LONGEST = 24
DATA = "dataset_path: json\ndataset_kwargs: {{data_files: {{test: {rows}}}}}\ntest_split: test\n"
TASKS = {
    "choose": """\
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
metric_list: [{metric: acc}]
""",
    "read": """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}} {{choices[0]}}"
metric_list: [{metric: word_perplexity}]
""",
    "write": f"""\
output_type: generate_until
doc_to_text: "Question: {{{{text}}}}\\nAnswer:"
doc_to_target: "{{{{choices[0]}}}}"
generation_kwargs: {{until: {json.dumps(STOPS)}, max_gen_toks: {LONGEST}, do_sample: false}}
metric_list: [{{metric: exact_match}}]
""",
}


def evaluated(model: str, address: str, tasks: str, folder: Path, *more: str) -> list[dict[str, Any]]:
    """Run the harness and return its record of each question."""
    (folder / "rows.json").write_text(json.dumps(ROWS))
    for name, task in TASKS.items():
        told = f"task: {name}\n" + DATA.format(rows=json.dumps(str(folder / "rows.json"))) + task
        (folder / f"{name}.yaml").write_text(told)
    command = [sys.executable, "-m", "lm_eval", "run", "--model", model, "--tasks", tasks, *more]
    command += ["--model_args", f"model=notso-demo,base_url={address}", "--include_path", str(folder)]
    command += ["--output_path", str(folder / "told"), "--log_samples"]
    own = {"HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=dict(os.environ) | own)
    assert ran.returncode == 0, ran.stderr[-4000:]
    files = sorted((folder / "told").rglob("samples_*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text("utf-8").splitlines()]


def asked(kept: dict[str, Any]) -> list[list[Any]]:
    """Return the arguments of each request that a question caused."""
    return [[*arguments.values()] for arguments in kept["arguments"].values()]


def direct(server_python: str, questions: list[list[Any]]) -> list[Any]:
    """Return the engine's own answers."""
    ran = subprocess.run(
        [server_python, str(DIRECT)], input=json.dumps(questions), capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return list(json.loads(ran.stdout))


@pytest.mark.timeout(2 * TIMEOUT_S)
def test_harness_log_probabilities_match_the_engine(demo: str, server_python: str, tmp_path: Path) -> None:
    kept = evaluated("local-completions", f"{demo}/v1/completions", "choose", tmp_path)
    assert len(kept) == len(ROWS)
    told = [[float(value), greedy == "True"] for each in kept for ((value, greedy),) in each["resps"]]
    assert told == direct(server_python, [["score", *pair] for each in kept for pair in asked(each)])
    assert len(told) == sum(len(row["choices"]) for row in ROWS) and {greedy for _, greedy in told} == {True, False}


@pytest.mark.timeout(2 * TIMEOUT_S)
def test_harness_rolling_log_probabilities_match_the_engine(demo: str, server_python: str, tmp_path: Path) -> None:
    kept = evaluated("local-completions", f"{demo}/v1/completions", "read", tmp_path)
    told = [float(value) for each in kept for ((value,),) in [each["resps"]]]
    assert told == [value for value, _ in direct(server_python, [["score", "", asked(each)[0][0]] for each in kept])]


@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize("model", ["local-completions", "local-chat-completions"])
def test_harness_answers_match_the_engine(demo: str, server_python: str, model: str, tmp_path: Path) -> None:
    is_chat = model == "local-chat-completions"
    path, more = ("chat/completions", ["--apply_chat_template"]) if is_chat else ("completions", [])
    kept = evaluated(model, f"{demo}/v1/{path}", "write", tmp_path, *more)
    told = [text for each in kept for ((text,),) in [each["resps"]]]
    questions = [["chat" if is_chat else "text", each] for each in (asked(kept_one)[0][0] for kept_one in kept)]
    if is_chat:
        questions = [[kind, json.loads(prompt[0])] for kind, prompt in questions]
    sampling = {"stop": STOPS if is_chat else [*STOPS, "<|im_end|>"], "max_tokens": LONGEST}
    assert told == direct(server_python, [[*question, sampling] for question in questions])
    assert any(told)
