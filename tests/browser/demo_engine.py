"""The real engine with the demo model, held where a test wants to look.

The model, the scheduler, the cache, the tokenizer and the streams are those that people use. A test may only say when
the next step is taken (`pace_s`, `hold`), and, where the words matter, which token is drawn (`dictate`): the step that
leads to it is computed all the same, as in tests/smollm3/engine/test_engine.py.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from notso.smollm3 import Engine

Words = list[str | bytes]

HELD_S = 0.003  # between two looks of an engine that is held
THOUGHT_END = "\n"  # what the model itself writes behind its thoughts


class DemoEngine:
    """Loads engines whose steps it holds. `prompts`: what each answer was begun with, as the model reads it.

    pace_s: passes before each step. suggestions: what is said where follow-up questions are asked for.
    """

    def __init__(self) -> None:
        self.pace_s = 0.0
        self.suggestions = ""
        self.prompts: list[str] = []
        self.engine: Engine | None = None
        self._of_byte: list[int] = []
        self._dictated: deque[tuple[Words, Words]] = deque()
        self._refrain: tuple[Words, Words] | None = None
        self._held: Callable[[Any], bool] | None = None
        self._at_hold = threading.Event()

    def load(self, path: Path | None = None, *, rows: int | None = None, **options: Any) -> Engine:
        """What a server is given. `rows`: how much of a prompt one step reads; the rest are Engine.load's options."""
        engine = Engine.load(path, **options)
        core, runner = engine._core, engine._runner
        step, submit = core._step, core.submit
        if rows is not None:
            runner.max_rows = rows

        def held_step() -> None:
            if self._is_held(core._requests.values()):
                time.sleep(HELD_S)
                return  # the loop goes on: who wants to stop is heard
            if self.pace_s:
                time.sleep(self.pace_s)
            step()

        def noted_submit(request: Any) -> None:
            self.prompts.append(engine.tokenizer.decode(request.sequence.prompt))
            if words := self._next_words(is_suggestion=request.sequence.priority > 0):
                self._put_in_mouth(engine, request, *words)
            submit(request)

        core._step, core.submit = held_step, noted_submit
        self.engine = engine
        return engine

    # ---- when

    def hold(self, where: str, tokens: int = 3) -> None:
        """Take no step once an answer is in that part ("prefill", "thinking" or "answer") and so many tokens far."""
        part = {"prefill": _read, "thinking": _thought, "answer": _answered}[where]
        self._at_hold.clear()
        self._held = lambda request: part(request) >= tokens

    def hold_all(self) -> None:
        """Take no step at all."""
        self._at_hold.clear()
        self._held = lambda request: True

    def reached(self, timeout_s: float = 60) -> None:
        """Wait until it is held."""
        assert self._at_hold.wait(timeout_s), "no answer came that far"

    def release(self) -> None:
        """Go on."""
        self._held = None

    @contextmanager
    def held(self, where: str, tokens: int = 3) -> Iterator[None]:
        """Held from there on, and released at the end of the block."""
        self.hold(where, tokens)
        try:
            yield
        finally:
            self.release()

    # ---- what

    def dictate(self, answer: str | Sequence[bytes], thoughts: str = "") -> None:
        """The next answer of a person says this; bytes are drawn one token each, and may be no UTF-8 at all."""
        self._dictated.append(_parts(answer, thoughts))

    def always(self, answer: str | Sequence[bytes], thoughts: str = "") -> None:
        """Every answer for which nothing else is dictated says this."""
        self._refrain = _parts(answer, thoughts)

    def _next_words(self, *, is_suggestion: bool) -> tuple[Words, Words] | None:
        if is_suggestion:
            return _parts(self.suggestions, "") if self.suggestions else None
        return self._dictated.popleft() if self._dictated else self._refrain

    def _put_in_mouth(self, engine: Engine, request: Any, answer: Words, thoughts: Words) -> None:
        tokenizer = engine.tokenizer
        ids = [token for part in answer for token in self._ids(engine, part)]
        inside = [token for part in thoughts for token in self._ids(engine, part)]
        thought = [*inside, tokenizer.think_close_id, *tokenizer.encode(THOUGHT_END)]
        if request.output.in_reasoning:  # it goes on with a thought
            ids = [*thought, *ids]
        elif thoughts and tokenizer.think_close_id not in request.sequence.prompt[-8:]:
            ids = [tokenizer.think_open_id, *thought, *ids]
        request.sampler = Dictation(request, ids, tokenizer.think_close_id, min(tokenizer.end_ids))

    def _ids(self, engine: Engine, part: str | bytes) -> list[int]:
        tokenizer = engine.tokenizer
        if isinstance(part, str):
            return tokenizer.encode(part)
        if not self._of_byte:
            every = {tokenizer.token_bytes(token): token for token in range(tokenizer.vocab_size)}
            self._of_byte = [every[bytes([byte])] for byte in range(256)]
        return [self._of_byte[byte] for byte in part]

    def _is_held(self, requests: Any) -> bool:
        held = self._held
        if held is None or not any(held(request) for request in list(requests)):
            return False
        self._at_hold.set()
        return True


class Dictation:
    """In place of a sampler: token by token what it was told, then an end. A thought that is closed from outside is
    left where it was."""

    def __init__(self, request: Any, ids: list[int], close: int | None, end: int) -> None:
        self._sampler = request.sampler
        self._request = request
        self._ids = iter(ids)
        self._close = close
        self._end = end

    def sample(self, logits: Any, history: Sequence[int], position: int) -> int:
        """The next token."""
        ids, answer = self._ids, self._request.output
        token = next(ids, self._end)
        if answer.reasoning_tokens and not answer.in_reasoning and self._close is not None:
            close, self._close = self._close, None  # the thought is over: by itself, or because somebody wanted it so
            rest = [token, *ids]
            self._ids = iter(rest[rest.index(close) + 1 :] if close in rest else rest)
            token = next(self._ids, self._end)
        return token

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


def _parts(answer: str | Sequence[bytes], thoughts: str) -> tuple[Words, Words]:
    return [answer] if isinstance(answer, str) else list(answer), [thoughts] if thoughts else []


def _read(request: Any) -> int:
    return 0 if request.read else request.sequence.computed


def _thought(request: Any) -> int:
    return request.output.reasoning_tokens if request.output.in_reasoning else 0


def _answered(request: Any) -> int:
    return 0 if request.output.in_reasoning else request.output.tokens - request.output.reasoning_tokens
