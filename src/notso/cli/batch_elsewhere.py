"""Run a batch on engines of a Ray cluster, and write the answers locally."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from notso.cli import cluster, engines, terminal
from notso.cli.batch_files import BatchInput, BatchOutput, RequestLine
from notso.cli.batch_run import BatchRun
from notso.cli.terminal import Interruption

SHARE = 32  # lines per task: twice an engine's concurrency, and the most work that a lost machine can cost


@dataclass(slots=True)
class Tally:
    """Counts of lines."""

    answered: int = 0
    failed: int = 0


class Member:
    """Ray actor that holds one engine."""

    def __init__(self, **chosen: Any) -> None:
        self._engine = engines.open_engine(chosen.pop("model"), chosen.pop("context_tokens"), **chosen, silent=True)

    def __call__(self, asked: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
        """Return answers in the order of the requests."""
        share = _Share([_line(text) for text in asked["request"]])
        BatchRun(self._engine, share, share, Interruption(), lambda what, done, total: None).answer_all()
        return {"answer": [json.dumps(share.answers[line.id]) for line in share.lines()]}


class _Share:
    def __init__(self, lines: list[RequestLine]) -> None:
        self._lines = lines
        self.ids = {line.id for line in lines}
        self.done: set[str] = set()
        self.answers: dict[str, dict[str, Any]] = {}

    def lines(self) -> Iterable[RequestLine]:
        return self._lines

    def write(self, answer: dict[str, Any]) -> None:
        self.answers[answer["id"]] = answer
        self.done.add(answer["id"])


def answer_elsewhere(
    source: BatchInput,
    sink: BatchOutput,
    interruption: Interruption,
    report: terminal.Progress,
    chosen: Mapping[str, Any],
    count: int | None,
) -> Tally:
    """Run until every line has an answer, or Ctrl-C. Raises ClusterError."""
    control = cluster.ray_control()
    from notso.cluster.batch_pool import answers

    model = chosen["model"]
    # The path must be valid on every machine.
    options = {**chosen, "model": None if model is None else Path(model).absolute()}
    missing = [_text(line) for line in source.lines() if line.id not in sink.done]
    told = Tally()
    report("answering", len(sink.done), len(source.ids))
    with control.connected(os.environ.get("RAY_ADDRESS"), os.cpu_count() or 1):
        for text in answers(missing, Member, options, engines=count, share=SHARE):
            answer = json.loads(text)
            sink.write(answer)
            if answer["error"] is None:
                told.answered += 1
            else:
                told.failed += 1
            report("answering", len(sink.done), len(source.ids))
            if interruption.requested():
                break
    return told


def _text(line: RequestLine) -> str:
    # Base64, because lines may not be valid UTF-8.
    content = None if line.content is None else base64.b64encode(line.content).decode()
    return json.dumps({**asdict(line), "content": content})


def _line(text: str) -> RequestLine:
    fields = json.loads(text)
    content = fields["content"]
    return RequestLine(**{**fields, "content": None if content is None else base64.b64decode(content)})
