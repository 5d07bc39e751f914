"""Convert an answer's tokens to events, and compute log probabilities of answer and prompt tokens."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from functools import partial

from notso.smollm3.output.lookahead import Span, StopStrings
from notso.smollm3.output.reasoning_parser import Piece, ReasoningParser, ends_in_reasoning
from notso.smollm3.output.tool_parser import ToolCallParser, ToolCallPart
from notso.smollm3.sampling.sampler import Floats, likeliest, log_probabilities
from notso.smollm3.text.tokenizer import Tokenizer, TokenStream
from notso.smollm3.values.events import Event, EventKind, FinishReason, TokenLogprob
from notso.smollm3.values.messages import ToolCall


def token_logprob(tokenizer: Tokenizer, logits: Floats | None, token: int, alternatives: int) -> TokenLogprob:
    """Return a token's log probability from logits (V,). Raises EngineError for invalid logits."""
    # Tokens that the engine inserts, such as `</think>`, have no logits; their probability is 1.
    if logits is None:
        return _make_entry(tokenizer, token, 0.0)
    values = log_probabilities(logits)
    entry = partial(_make_entry, tokenizer)
    top = tuple(entry(other, float(values[other])) for other in likeliest(values, alternatives))
    return entry(token, float(values[token]), top)


class PromptScores:
    """Log probabilities of a prompt's tokens. Each is reported once."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], alternatives: int) -> None:
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._alternatives = alternatives
        self._reported = 0

    def consume(self, start: int, logits: Floats) -> tuple[TokenLogprob, ...]:
        """Return unreported entries, given logits (rows, V) from position `start` on. Raises EngineError."""
        entries = []
        if self._reported == 0:
            entries.append(_make_entry(self._tokenizer, self._prompt[0], math.nan))
            self._reported = 1
        for at, row in enumerate(logits, start + 1):
            if self._reported <= at < len(self._prompt):
                entries.append(token_logprob(self._tokenizer, row, self._prompt[at], self._alternatives))
                self._reported = at + 1
        return tuple(entries)


def _make_entry(tokenizer: Tokenizer, token: int, logprob: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
    return TokenLogprob(tokenizer.token_text(token), tuple(tokenizer.token_bytes(token)), logprob, top, token)


# A number of characters, and the log probability entry of their token (None if it was already returned).
Share = tuple[int, TokenLogprob | None]


class LogprobAlignment:
    """Maps spans of text to the log probability entries of their tokens."""

    # An entry is returned with the first shown character of its token. If a token is only part of a character, its
    # entry is returned with that character. Entries of hidden tokens are returned with the next span or, if there is
    # none, by `rest`.
    def __init__(self) -> None:
        self._end = 0
        self._tokens: deque[tuple[int, int, TokenLogprob | None]] = deque()  # start, length, entry

    def add(self, length: int, entry: TokenLogprob | None) -> None:
        self._tokens.append((self._end, length, entry))
        self._end += length

    def rest(self) -> list[TokenLogprob]:
        return [entry for _, _, entry in self._tokens if entry is not None]

    def pop_remaining(self) -> list[TokenLogprob]:
        rest = self.rest()
        self._tokens = deque((start, length, None) for start, length, _ in self._tokens)
        return rest

    def consume(self, span: Span) -> list[Share]:
        """Return the tokens' shares of a span and of the hidden text before it. Spans must be in order."""
        shares: list[Share] = []
        end = span.start + len(span)
        while self._tokens and self._tokens[0][0] < end:
            at, length, entry = self._tokens.popleft()
            shared = max(0, min(at + length, end) - max(at, span.start))
            if shared or entry is not None:
                shares.append((shared, entry))
                entry = None
            if at + length > end:
                self._tokens.appendleft((end, at + length - end, entry))
        return shares


class OutputProcessor:
    """Converts tokens to reasoning, text and tool-call events."""

    # Output passes through a chain of stages, which decode bytes to characters, separate reasoning from the answer,
    # find stop strings, and find tool calls. Each stage holds back text that it cannot classify yet.

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stop: Sequence[str],
        find_tool_calls: bool,
        goes_on: bool = False,
        is_plain: bool = False,
        *,
        one_call: bool = False,
        is_structured: bool = False,
        calls_are_valid: bool = False,
        tool_names: Collection[str] | None = None,
        stop_token_ids: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> None:
        # goes_on: the prompt ends with the beginning of the answer.
        # is_plain: reasoning tags are treated as text.
        # one_call: the answer ends after its first tool call.
        # is_structured: a grammar constrains the answer, which starts only when `begin` is called.
        # calls_are_valid: a grammar guarantees valid tool calls, so their arguments can be streamed.
        # min_tokens: stop strings take effect only after this many tokens.
        self._tokenizer = tokenizer
        self._end_ids = tokenizer.end_ids.union(stop_token_ids)
        self._min_tokens = min_tokens
        self._characters = TokenStream(tokenizer)
        tags = (None, None) if is_plain else (tokenizer.think_open_id, tokenizer.think_close_id)
        self._thinking = ReasoningParser(
            *tags, ends_in_reasoning(prompt, *tags), goes_on or is_plain, explicit_start=is_structured
        )
        self._stops = StopStrings(stop)
        self._calls = ToolCallParser(calls_are_valid, tool_names) if find_tool_calls else None
        self._called = False
        self._one_call = one_call
        # Entries of hidden tokens (tags, tool calls, stop strings) are emitted with the next shown text, or stay in
        # `unreported_logprobs` if no text follows.
        self._decoded, self._text_alignment = LogprobAlignment(), LogprobAlignment()
        self.finish_reason: FinishReason | None = None
        self.tokens = 0
        self.reasoning_tokens = 0

    def push(self, token: int, logprob: TokenLogprob | None = None) -> Iterator[Event]:
        """Yield the events of a token, and set `finish_reason` if it ends the answer."""
        self.tokens += 1
        if token in self._end_ids:
            self.finish_reason = "stop"
            self._decoded.add(0, logprob)
            return
        if token == self._tokenizer.think_close_id:
            self.drop_partial_character()
        was_reasoning = self._thinking.in_reasoning
        text = self._characters.push(token)
        self._decoded.add(len(text), logprob)
        pieces = self._thinking.feed(token, text)
        self.reasoning_tokens += was_reasoning or self._thinking.in_reasoning
        yield from self._process_pieces(pieces)
        if was_reasoning and not self._thinking.in_reasoning and (unreported_logprobs := self._decoded.pop_remaining()):
            # The closing tag counts as reasoning, so its log probability must not be reported with the answer's text.
            yield self._event("reasoning", "", unreported_logprobs)

    @property
    def in_reasoning(self) -> bool:
        return self._thinking.in_reasoning

    @property
    def stopped_by(self) -> str | None:
        return self._stops.matched

    @property
    def unreported_logprobs(self) -> tuple[TokenLogprob, ...]:
        return (*self._text_alignment.rest(), *self._decoded.rest())

    def drop_partial_character(self) -> None:
        if self._thinking.in_reasoning:
            self._characters.drop()

    def begin(self, calls: bool) -> None:
        """Start the answer at the next token; `calls`: look for tool calls in it."""
        self._thinking.begin_answer()
        if not calls:
            self._calls = None

    def end(self) -> None:
        self.finish_reason = self.finish_reason or "stop"

    def finish(self, reason: FinishReason) -> Iterator[Event]:
        was_cut = self._is_cut
        self.finish_reason = self.finish_reason or reason
        if not was_cut:
            leftover = self._characters.finish()
            self._decoded.add(len(leftover), None)
            pieces = self._thinking.feed(-1, leftover) if leftover else []
            yield from self._process_pieces([*pieces, *self._thinking.finish()])
        if not self._is_cut:
            yield from self._text(self._stops.finish())
        if self._calls is not None and not (self._called and self._one_call):
            yield from self._answer_events(self._calls.finish())
        if self._called and self.finish_reason == "stop":
            self.finish_reason = "tool_calls"

    # True after a stop string or the only allowed tool call. The rest of the answer yields no events.
    _is_cut = False

    def _process_pieces(self, pieces: Sequence[Piece]) -> Iterator[Event]:
        for kind, text in pieces:
            shares = self._decoded.consume(text)
            if kind == "reasoning":
                yield self._event("reasoning", text, [entry for _, entry in shares])
                continue
            for length, entry in shares:
                self._text_alignment.add(length, entry)
            is_early = self.tokens <= self._min_tokens
            shown, matched = (self._stops.pass_through(text), False) if is_early else self._stops.push(text)
            yield from self._text(shown)
            if matched:
                self._is_cut = True
                self.finish_reason = "stop"
            if self._is_cut:
                return

    def _text(self, text: Span) -> Iterator[Event]:
        if self._calls is not None:
            yield from self._answer_events(self._calls.push(text))
        elif text:
            yield from self._answer_events([text])

    def _answer_events(self, pieces: Sequence[Span | ToolCall | ToolCallPart]) -> Iterator[Event]:
        for piece in pieces:
            if isinstance(piece, ToolCall):
                self._called = True
                yield Event("tool_call", tool_call=piece)
                if self._one_call:
                    self._is_cut = True
                    self.finish_reason = "stop"
                    return
            elif isinstance(piece, ToolCallPart):
                begun = ToolCall(piece.id, piece.name, "")
                yield Event("tool_call_part", piece.text, begun_call=begun, tokens=self.tokens)
            elif piece:
                yield self._event("text", piece, [entry for _, entry in self._text_alignment.consume(piece)])

    def _event(self, kind: EventKind, text: str, entries: Sequence[TokenLogprob | None]) -> Event:
        logprobs = tuple(entry for entry in entries if entry is not None)
        return Event(kind, str(text), tokens=self.tokens, logprobs=logprobs)
