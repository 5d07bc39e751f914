"""A batch over two engines under Ray Data gives the same answers as one engine and resumes after a kill."""

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
from cluster.ray_cluster import HAS_RAY, NO_RAY

from notso.cli.exit_codes import REQUESTS_FAILED

pytestmark = [
    pytest.mark.long("ray"),
    pytest.mark.timeout(600),
    pytest.mark.skipif(not HAS_RAY, reason=NO_RAY),
]

LINES = 200
ELSEWHERE = ("--ray", "--engines", "2", "--threads", "1")


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    """Write a batch file whose last line is not a valid request."""
    path = tmp_path / "in.jsonl"
    fields = {"method": "POST", "url": "/v1/chat/completions"}
    options = {"max_tokens": 8, "temperature": 0, "reasoning_effort": "none"}
    with path.open("w") as file:
        for number in range(LINES):
            body = {"messages": [{"role": "user", "content": f"question {number}"}], **options}
            file.write(json.dumps({"custom_id": f"{number}", **fields, "body": body}) + "\n")
        file.write("{}\n")
    return path


def start(requests: Path, answers: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "notso", "batch", str(requests), str(answers), "--json", *options]
    environment = {**os.environ, "HOME": str(requests.parent)}
    environment.pop("RAY_ADDRESS", None)
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def said(answers: Path) -> dict[str, Any]:
    """Return the answers by id, without timestamps and model names."""
    found = [json.loads(line) for line in answers.read_text().splitlines()]
    assert len({answer["id"] for answer in found}) == len(found)
    return {
        answer["id"]: (
            answer["custom_id"],
            answer["response"]["status_code"],
            [choice["message"]["content"] for choice in answer["response"]["body"].get("choices", ())],
        )
        for answer in found
    }


def test_killed_ray_batch_resumes_with_answers_of_a_single_engine(requests: Path, tmp_path: Path) -> None:
    here, there = tmp_path / "here.jsonl", tmp_path / "there.jsonl"
    assert start(requests, here).wait() == REQUESTS_FAILED  # the last line is not a valid request

    first = start(requests, there, *ELSEWHERE)
    while first.poll() is None and not (there.exists() and there.read_text().count("\n") > 10):
        time.sleep(0.01)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    kept = there.read_text().count("\n")
    assert kept

    told, _ = (second := start(requests, there, *ELSEWHERE)).communicate()
    assert second.returncode == REQUESTS_FAILED
    print(told)
    report = json.loads(told)
    assert kept - 1 <= report["there"] <= kept and report["left"] == 0
    assert report["there"] + report["answered"] + report["failed"] == LINES + 1
    assert said(there) == said(here)
