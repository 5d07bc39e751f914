"""The real engine with the demo model, which tests can pause and script.

Model, scheduler, cache, tokenizer and streams are the real ones. A test controls only when the next step runs
(`pace_s`, `hold`) and, if the words matter, which token is sampled (`dictate`). The step is still computed, as in
tests/smollm3/engine/test_engine.py.
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

HELD_S = 0.003  # pause between two checks of a held engine
THOUGHT_END = "\n"  # the text that the model itself writes after its reasoning


class DemoEngine:
    """Loads engines whose steps tests can hold. `prompts`: the prompt of each answer, as the model reads it.

    pace_s: pause before each step. suggestions: the text of generated follow-up questions.
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
        """Load an engine for a server. `rows`: prompt tokens per step; `options` are passed to Engine.load."""
        engine = Engine.load(path, **options)
        core, runner = engine._core, engine._runner
        step, submit = core._step, core.submit
        if rows is not None:
            runner.max_rows = rows

        def held_step() -> None:
            if self._is_held(core._requests.values()):
                time.sleep(HELD_S)
                return  # the loop continues, so that requests can be stopped
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

    # ---- timing

    def hold(self, where: str, tokens: int = 3) -> None:
        """Run no step while an answer has at least `tokens` tokens in the part "prefill", "thinking" or "answer"."""
        part = {"prefill": _read, "thinking": _thought, "answer": _answered}[where]
        self._at_hold.clear()
        self._held = lambda request: part(request) >= tokens

    def hold_all(self) -> None:
        """Run no step at all."""
        self._at_hold.clear()
        self._held = lambda request: True

    def reached(self, timeout_s: float = 60) -> None:
        """Wait until the engine is held."""
        assert self._at_hold.wait(timeout_s), "no answer reached this point"

    def release(self) -> None:
        """Let the engine continue."""
        self._held = None

    @contextmanager
    def held(self, where: str, tokens: int = 3) -> Iterator[None]:
        """Hold at this point inside the context, and release at its end."""
        self.hold(where, tokens)
        try:
            yield
        finally:
            self.release()

    # ---- text

    def dictate(self, answer: str | Sequence[bytes], thoughts: str = "") -> None:
        """Set the text of the next answer. Bytes are sampled one per token and may be invalid UTF-8."""
        self._dictated.append(_parts(answer, thoughts))

    def always(self, answer: str | Sequence[bytes], thoughts: str = "") -> None:
        """Set the text of every answer for which no other text is set."""
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
        if request.output.in_reasoning:  # the prompt ends inside the reasoning
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
    """Replaces a sampler: samples the given tokens, then the end. If reasoning is closed early, its rest is skipped."""

    def __init__(self, request: Any, ids: list[int], close: int | None, end: int) -> None:
        self._sampler = request.sampler
        self._request = request
        self._ids = iter(ids)
        self._close = close
        self._end = end

    def sample(self, logits: Any, history: Sequence[int], position: int) -> int:
        """Return the next token."""
        ids, answer = self._ids, self._request.output
        token = next(ids, self._end)
        if answer.reasoning_tokens and not answer.in_reasoning and self._close is not None:
            # the reasoning has ended, by its own end or by a request to answer now
            close, self._close = self._close, None
            rest = [token, *ids]
            self._ids = iter(rest[rest.index(close) + 1 :] if close in rest else rest)
            token = next(self._ids, self._end)
        return token

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


def _parts(answer: str | Sequence[bytes], thoughts: str) -> tuple[Words, Words]:
    return [answer] if isinstance(answer, str) else list(answer), [thoughts] if thoughts else []


def _read(request: Any) -> int:
    return 0 if request.prefilled_at else request.sequence.computed


def _thought(request: Any) -> int:
    return request.output.reasoning_tokens if request.output.in_reasoning else 0


def _answered(request: Any) -> int:
    return 0 if request.output.in_reasoning else request.output.tokens - request.output.reasoning_tokens
