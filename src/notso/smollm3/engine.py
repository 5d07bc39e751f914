"""The engine: a model file, loaded once, that answers one conversation at a time."""

from __future__ import annotations

import math
import operator
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date as Date
from pathlib import Path

import numpy as np
import numpy.typing as npt

from notso.qtensor import backend, ops
from notso.qtensor.gguf import GGUFFile
from notso.smollm3.answer import Answer
from notso.smollm3.chat_template import KNOWN_TEMPLATES, ChatTemplate
from notso.smollm3.config import SmolLM3Config
from notso.smollm3.errors import ContextLengthError, InvalidRequestError, ModelFileError
from notso.smollm3.hub import demo_path
from notso.smollm3.kv_cache import KVCache, kv_bytes_per_token
from notso.smollm3.memory import plan_memory
from notso.smollm3.messages import Event, FinishReason, Message, ModelInfo, Tool, Usage
from notso.smollm3.model import SmolLM3, Step
from notso.smollm3.residency import Residency, WeightPromotion
from notso.smollm3.sampling import Sampler
from notso.smollm3.sampling_params import SamplingParams
from notso.smollm3.tokenizer import Tokenizer
from notso.smollm3.weights import SmolLM3Weights

Floats = npt.NDArray[np.float32]

DEFAULT_CONTEXT_TOKENS = 8192
"""What a chat gets unless it asks for more: small enough for any machine that holds the weights."""

PREFILL_CHUNK_TOKENS = 512
"""Rows of one prefill step. Stopping, and the memory for a step, go by this; results do not depend on it."""


class Engine:
    """A loaded SmolLM3. Methods may be called from any thread; generations wait for one another."""

    def __init__(
        self,
        file: GGUFFile,
        *,
        context_tokens: int | None,
        threads: int | None,
        is_demo: bool,
        weights_on: Residency = "auto",
    ) -> None:
        """Use `Engine.load`."""
        backend.configure(threads)
        self._file = file
        self.config = SmolLM3Config.from_metadata(file.metadata)
        weights = SmolLM3Weights.from_tensors(file.tensors, self.config)
        weight_bytes = sum(tensor.nbytes for tensor in file.tensors.values())
        context = self._plan_context(context_tokens, weight_bytes)
        self._cache = KVCache(self.config, context)
        self._model = SmolLM3(self.config, weights, self._cache)
        self.tokenizer = Tokenizer.from_gguf(file.metadata, file.path)
        self._template = _template(file, self.tokenizer, is_demo)
        self._decode_step = Step(self.config, rows=1, sampled=1)
        self._decode_program: ops.Program | None = None
        self._cached_ids: list[int] = []  # what the cache holds, position by position
        self._lock = threading.Lock()
        self._closed = False
        self._busy_until = time.monotonic()
        self._promotion = WeightPromotion(
            file, weights, wanted=weights_on, take=self._take_promoted, idle_s=self._idle_s
        )
        self._promotion.start()
        name = str(file.metadata.get("general.name") or file.path.stem)
        counts: dict[str, int] = {}
        for tensor in file.tensors.values():
            counts[tensor.format.name] = counts.get(tensor.format.name, 0) + 1
        self.info = ModelInfo(
            name=name,
            path=str(file.path),
            is_demo=is_demo,
            size_bytes=file.size_bytes,
            parameter_count=sum(math.prod(tensor.shape) for tensor in file.tensors.values()),
            context_tokens=context,
            quantisation=counts,
            kernels=backend.kernels(),
            threads=backend.threads(),
        )

    @classmethod
    def load(
        cls,
        path: str | Path | None = None,
        *,
        context_tokens: int | None = None,
        threads: int | None = None,
        weights: Residency = "auto",
    ) -> Engine:
        """Map a GGUF file and make it ready; None loads the demo model that ships with the package.

        context_tokens: capacity of prompt and answer together; None takes up to 8,192 as memory allows. Beyond the
        model's trained context YaRN doubles it; more is refused. threads: None uses one for each physical core.
        weights: "mmap" reads them from the mapped file; "hugepages" copies them to 2 MiB pages in the background while
        it already answers; "auto" does so for files where it pays, if memory and the system allow.

        Raises GGUFError, ModelFileError, TemplateError, OutOfMemoryError, InvalidRequestError or KernelChoiceError.
        """
        is_demo = path is None
        return cls(
            GGUFFile.open(demo_path() if path is None else path),
            context_tokens=context_tokens,
            threads=threads,
            is_demo=is_demo,
            weights_on=weights,
        )

    @property
    def weights_residency(self) -> str:
        """Where the weights are read from: "mmap", "hugepages", or how far the copy has come."""
        return self._promotion.state

    def settle(self, timeout_s: float | None = None) -> None:
        """Wait until the weights are where they are to stay. For measurements; answering needs no waiting."""
        self._promotion.wait(timeout_s)

    def close(self) -> None:
        """Let go of the file and the cache. A generation under way ends at its next step; later calls are refused."""
        self._closed = True
        self._promotion.stop()
        self._file.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Prompts

    def render(
        self,
        messages: Sequence[Message],
        thinking: bool = True,
        tools: Sequence[Tool] | None = None,
        date: Date | None = None,
    ) -> str:
        """The exact text of the prompt, as the model file's template prints it."""
        return self._chat_template.render(messages, thinking=thinking, tools=tools, date=date)

    def encode_chat(
        self,
        messages: Sequence[Message],
        thinking: bool = True,
        tools: Sequence[Tool] | None = None,
        date: Date | None = None,
    ) -> list[int]:
        """The prompt's token ids. Control tokens come from the template only, never from what a message says."""
        return self._chat_template.encode(self.tokenizer, messages, thinking=thinking, tools=tools, date=date)

    # Numbers

    def logits(self, ids: Sequence[int]) -> Floats:
        """Logits (L, vocab) float32 after each of `ids`, from an empty context."""
        with self._lock:
            self._require_open()
            tokens = self._checked_ids(ids)
            if len(tokens) > self._cache.capacity_tokens:
                raise ContextLengthError(len(tokens), self._cache.capacity_tokens)
            self._forget_from(0)
            out = np.empty((len(tokens), self.config.vocab_size), np.float32)
            for start in range(0, len(tokens), PREFILL_CHUNK_TOKENS):
                chunk = tokens[start : start + PREFILL_CHUNK_TOKENS]
                out[start : start + len(chunk)] = self._read(chunk, sampled=range(len(chunk)))
            return out

    # Answers

    def generate(
        self,
        messages: Sequence[Message] | Sequence[int],
        params: SamplingParams | None = None,
        *,
        thinking: bool = True,
        tools: Sequence[Tool] | None = None,
        date: Date | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Iterator[Event]:
        """Answer a conversation, or continue a list of token ids: reasoning and text as they come, usage, end.

        Blocks between events; closing the iterator, or `cancelled()` turning true (asked before each step), stops it.
        Until it is read to its end or closed, every other call that computes waits; in the same thread, for ever.
        Of the prompt, what the last generation left in the cache is not computed again.

        Raises InvalidRequestError, ContextLengthError, TemplateError (before the first event) or EngineError.
        """
        params = params or SamplingParams()
        if not hasattr(messages, "__len__") or len(messages) == 0:
            raise InvalidRequestError("messages or token ids are needed: there is nothing to answer", param="messages")
        if isinstance(messages[0], Message):
            prompt = self.encode_chat(messages, thinking, tools, date)  # type: ignore[arg-type]
        else:
            prompt = self._checked_ids(messages)  # type: ignore[arg-type]
        room = self._cache.capacity_tokens - len(prompt)
        if room < 1:
            raise ContextLengthError(len(prompt) + 1, self._cache.capacity_tokens)
        if params.max_tokens is not None and params.max_tokens > room:
            raise ContextLengthError(len(prompt) + params.max_tokens, self._cache.capacity_tokens)
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        sampler = Sampler(params, seed, self.config.vocab_size)
        answer = Answer(self.tokenizer, prompt, params.stop, find_tool_calls=bool(tools))
        return self._generate(prompt, params.max_tokens or room, sampler, answer, cancelled or (lambda: False))

    def _generate(
        self, prompt: list[int], most: int, sampler: Sampler, answer: Answer, cancelled: Callable[[], bool]
    ) -> Iterator[Event]:
        with self._lock:
            self._require_open()
            started = time.perf_counter()
            cached = self._reuse(prompt)
            logits = self._prefill(prompt[cached:], cancelled)
            read = time.perf_counter()
            history = list(prompt)
            reason: FinishReason = "cancelled" if logits is None else "length"
            while logits is not None:
                token = sampler.sample(logits, history, len(history))
                history.append(token)
                yield from answer.push(token)
                if answer.finish_reason is not None or answer.tokens >= most:
                    break
                if cancelled() or self._closed:
                    reason = "cancelled"
                    break
                logits = self._decode(token)
            yield from answer.finish(reason)
            yield Event(
                "usage",
                usage=Usage(
                    prompt_tokens=len(prompt),
                    completion_tokens=answer.tokens,
                    reasoning_tokens=answer.reasoning_tokens,
                    cached_tokens=cached,
                    prompt_ms=1000 * (read - started),
                    completion_ms=1000 * (time.perf_counter() - read),
                ),
            )
            self._busy_until = time.monotonic()
            yield Event("end", finish_reason=answer.finish_reason)

    def _reuse(self, prompt: list[int]) -> int:
        """Keep the longest cached prefix of `prompt`, but for its last token, whose logits are needed. Its length."""
        common = 0
        for ours, theirs in zip(self._cached_ids, prompt[:-1], strict=False):
            if ours != theirs:
                break
            common += 1
        self._forget_from(common)
        return common

    def _forget_from(self, length: int) -> None:
        self._cache.truncate(length)
        del self._cached_ids[length:]

    def _prefill(self, tokens: list[int], cancelled: Callable[[], bool]) -> Floats | None:
        """Read tokens in chunks; the logits (vocab,) after the last one, or None when cancelled on the way."""
        logits: Floats | None = None
        for start in range(0, len(tokens), PREFILL_CHUNK_TOKENS):
            if cancelled() or self._closed:
                return None
            chunk = tokens[start : start + PREFILL_CHUNK_TOKENS]
            is_last = start + len(chunk) == len(tokens)
            rows = self._read(chunk, sampled=range(len(chunk) - 1, len(chunk)) if is_last else range(0))
            logits = rows[0] if is_last else None
        return logits

    def _read(self, chunk: Sequence[int], sampled: range) -> Floats:
        """One step over several tokens: logits (sampled, vocab)."""
        self._adopt_promoted()
        step = Step(self.config, len(chunk), len(sampled))
        start = self._cache.extend(len(chunk))
        step.token_ids[:] = chunk
        step.positions[:] = np.arange(start, start + len(chunk))
        step.sampled_rows[:] = sampled
        self._model.forward(step)
        self._cached_ids.extend(chunk)
        return step.logits

    def _decode(self, token: int) -> Floats:
        """One step over one token, replayed from the recorded program: logits (vocab,), valid until the next step."""
        self._adopt_promoted()
        step = self._decode_step
        if self._decode_program is None:
            program = ops.Program()
            with program.record():
                self._model.forward(step)
            self._decode_program = program  # kept only when whole: Ctrl-C may come while it is recorded
        step.positions[0] = self._cache.extend(1)
        step.token_ids[0] = token
        self._decode_program.run()
        self._cached_ids.append(token)
        logits: Floats = step.logits[0]
        return logits

    def _idle_s(self) -> float:
        return 0.0 if self._lock.locked() else time.monotonic() - self._busy_until

    def _take_promoted(self) -> None:
        """Called by the promotion's thread when copies are ready: adopt them now if no generation is under way."""
        if self._lock.acquire(blocking=False):
            try:
                self._adopt_promoted()
            finally:
                self._lock.release()

    def _adopt_promoted(self) -> None:
        """Between two steps, exchange weights for their copies: same bytes, other pages."""
        promoted = self._promotion.adopt(self._model.weights)
        if promoted is not None:
            self._model.weights = promoted
            self._decode_program = None  # it points into the old pages

    # Checks

    @property
    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            raise ModelFileError("this model file has no chat template; give token ids instead of messages")
        return self._template

    def _checked_ids(self, ids: Sequence[int]) -> list[int]:
        if len(ids) == 0:
            raise InvalidRequestError("there are no tokens", param="messages")
        try:
            tokens = [operator.index(token) for token in ids]
        except TypeError:
            raise InvalidRequestError("messages or token ids are needed", param="messages") from None
        if min(tokens) < 0 or max(tokens) >= self.config.vocab_size:
            raise InvalidRequestError(f"token ids must be from 0 to {self.config.vocab_size - 1}", param="messages")
        return tokens

    def _require_open(self) -> None:
        if self._closed:
            raise InvalidRequestError("the engine is closed")

    def _plan_context(self, requested: int | None, weight_bytes: int) -> int:
        longest = 2 * self.config.max_position_embeddings  # with YaRN
        if requested is not None and not 1 <= requested <= longest:
            raise InvalidRequestError(f"context_tokens must be from 1 to {longest:,}", param="context_tokens")
        return plan_memory(
            weights_bytes=weight_bytes,
            kv_bytes_per_token=kv_bytes_per_token(self.config),
            max_context_tokens=min(self.config.max_position_embeddings, DEFAULT_CONTEXT_TOKENS),
            requested_tokens=requested,
        ).context_tokens


def _template(file: GGUFFile, tokenizer: Tokenizer, is_demo: bool) -> ChatTemplate | None:
    source = file.metadata.get("tokenizer.chat_template")
    if source is None:
        return None
    if not isinstance(source, str):
        raise ModelFileError("tokenizer.chat_template must be a string")
    return ChatTemplate(source, tokenizer.specials, known=KNOWN_TEMPLATES.keys())
