"""Run a command line in this process with a scripted engine, or in a separate process."""

from __future__ import annotations

import functools
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import typer.main

from notso.cli import engines, main
from notso.qtensor.errors import NotsoError
from notso.smollm3.diagnostics.synth import write_synthetic
from notso.smollm3.text.vocabulary import BYTE_CHARACTERS
from notso.smollm3.values.events import Event, Usage
from notso.smollm3.values.messages import Message
from notso.smollm3.values.model_info import ModelInfo
from notso.smollm3.values.request_options import Grammar, RequestOptions
from notso.smollm3.values.sampling_params import SamplingParams

USAGE = Usage(
    prompt_tokens=12, completion_tokens=4, reasoning_tokens=2, cached_tokens=3, prompt_ms=60.0, completion_ms=500.0
)


@dataclass
class ScriptedEngine:
    """Engine that yields the given events and records its arguments. An error in the script is raised."""

    script: list[Event | NotsoError | Callable[[], None]] = field(default_factory=list)
    is_demo: bool = False
    asked: list[list[Message]] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    thinking: list[bool] = field(default_factory=list)
    grammars: list[Grammar | None] = field(default_factory=list)
    options: list[RequestOptions] = field(default_factory=list)
    opened_with: tuple[Any, ...] = ()
    closed: bool = False

    @property
    def info(self) -> ModelInfo:
        return ModelInfo(
            name="Scripted",
            path="/nowhere/scripted.gguf",
            is_demo=self.is_demo,
            size_bytes=1_915_305_312,
            parameter_count=3_075_098_624,
            context_tokens=4096,
            kernels="generic",
            threads=2,
        )

    def generate(
        self,
        messages: Sequence[Message],
        params: SamplingParams,
        options: RequestOptions,
        *,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Iterator[Event]:
        self.grammars.append(options.grammar)
        self.options.append(options)
        self.asked.append(list(messages))
        self.params.append(params)
        self.thinking.append(options.thinking)
        finished = "stop"
        for step in self.script:
            if cancelled():
                finished = "cancelled"
                break
            if isinstance(step, NotsoError):
                raise step
            if callable(step):
                step()
            elif step.kind == "end":
                finished = step.finish_reason or "stop"
            else:
                yield step
        yield Event("usage", usage=USAGE)
        yield Event("end", finish_reason=finished)  # type: ignore[arg-type]

    def says(self, *texts: str, thinks: Sequence[str] = ()) -> None:
        self.script = [*(Event("reasoning", text=t) for t in thinks), *(Event("text", text=t) for t in texts)]

    def close(self) -> None:
        self.closed = True


TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
<|im_start|>assistant
{% if not enable_thinking %}<think>

</think>
{% endif %}"""
SPECIALS = {"<|im_start|>": 3, "<|im_end|>": 3, "<think>": 4, "</think>": 4}


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a model with random weights that a real engine can run: four layers, and one token for each byte."""
    tokens = [*BYTE_CHARACTERS, *SPECIALS]
    path = tmp_path_factory.mktemp("models") / "small.gguf"
    write_synthetic(
        path,
        layers=4,
        hidden=256,
        ffn=512,
        heads=4,
        kv_heads=1,
        vocab=320,
        tokenizer={
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smaug-bpe",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [1] * 256 + list(SPECIALS.values()),
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        },
        template=TEMPLATE,
    )
    return path


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def _clean_environment(own_home: Path) -> Iterator[None]:
    """Options such as --debug set environment variables, which must not affect the next test."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ScriptedEngine:
    """Replace the engine that every command opens in this test."""
    scripted = ScriptedEngine()

    def open_engine(
        model: Path | None, *, context_tokens: int | None = None, threads: int | None = None, **_: object
    ) -> ScriptedEngine:
        scripted.opened_with = (model, context_tokens, threads)
        return scripted

    monkeypatch.setattr(engines, "open_engine", open_engine)
    return scripted


@pytest.fixture(autouse=True, scope="session")
def command_built_once() -> Iterator[None]:
    """Build the command of all subcommands once instead of in every call, because it takes 40 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", functools.cache(typer.main.get_command))
        yield


@pytest.fixture
def notso(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Run a command line in this process; `stdin` is the piped input."""

    def run(*arguments: str, stdin: str | bytes = b"") -> Result:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(data)), encoding="utf-8"))
        code = main(arguments)
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run


@pytest.fixture
def process() -> Callable[..., subprocess.Popen[bytes]]:
    """Start `notso` in a separate process. `setup` is Python code that runs before it.

    The process receives Ctrl-C even if the tests run in the background (`&`), where shells make child processes ignore
    it.
    """

    def start(*arguments: str, setup: str = "", **options: Any) -> subprocess.Popen[bytes]:
        hear = "import signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)"
        code = f"{hear}\n{setup}\nfrom notso.cli import main\nsys.exit(main())"
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        return subprocess.Popen([sys.executable, "-c", code, *arguments], **{**pipes, **options})

    return start
