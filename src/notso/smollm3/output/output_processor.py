"""Conversion of an answer's tokens to events."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from notso.smollm3.output.logprobs import LogprobAlignment
from notso.smollm3.output.lookahead import Span, StopStrings
from notso.smollm3.output.reasoning_parser import Piece, ReasoningParser, opens_thinking
from notso.smollm3.output.tool_parser import CallPart, ToolCallParser
from notso.smollm3.text.tokenizer import Tokenizer
from notso.smollm3.values.events import Event, EventKind, FinishReason, TokenLogprob
from notso.smollm3.values.messages import ToolCall


class OutputProcessor:
    """Converts tokens to reasoning, text and tool-call events.

    Stages: bytes, characters, reasoning or answer, stop strings, tool calls; each holds back undecided text.
    """

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
        calls_are_held: bool = False,
        offered: Collection[str] | None = None,
        stop_token_ids: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> None:
        # goes_on: the prompt holds the beginning of the answer. is_plain: tags are text. calls_are_held: a grammar
        # guarantees calls, so arguments stream. offered: names of tools that can be called; None: any. min_tokens: stop
        # strings count only after these. one_call: the answer ends with its first call. is_structured: the answer
        # starts at `begin`. stop_token_ids: additional end tokens.
        self._tokenizer = tokenizer
        self._end_ids = tokenizer.end_ids.union(stop_token_ids)
        self._min_tokens = min_tokens
        self._characters = tokenizer.stream()
        tags = (None, None) if is_plain else (tokenizer.think_open_id, tokenizer.think_close_id)
        self._thinking = ReasoningParser(
            *tags, opens_thinking(prompt, *tags), goes_on or is_plain, answer_apart=is_structured
        )
        self._stops = StopStrings(stop)
        self._calls = ToolCallParser(calls_are_held, offered) if find_tool_calls else None
        self._called = False
        self._one_call = one_call
        # Each log probability is emitted once, with its token's first shown character. Those of hidden tokens (tags,
        # tool calls, stop strings) go with the next shown text, or remain in `untold`.
        self._decoded, self._text_alignment = LogprobAlignment(), LogprobAlignment()
        self.finish_reason: FinishReason | None = None
        self.tokens = 0
        self.reasoning_tokens = 0

    def push(self, token: int, logprob: TokenLogprob | None = None) -> Iterator[Event]:
        """Yield a token's events; set `finish_reason` at the end."""
        self.tokens += 1
        if token in self._end_ids:
            self.finish_reason = "stop"
            self._decoded.add(0, logprob)
            return
        if token == self._tokenizer.think_close_id:
            self.cut_character()
        was_reasoning = self._thinking.in_reasoning
        text = self._characters.push(token)
        self._decoded.add(len(text), logprob)
        pieces = self._thinking.feed(token, text)
        self.reasoning_tokens += was_reasoning or self._thinking.in_reasoning
        yield from self._pieces(pieces)
        if was_reasoning and not self._thinking.in_reasoning and (untold := self._decoded.take_rest()):
            # The tag counts as reasoning, so its entry must not wait for the answer's first text.
            yield self._event("reasoning", "", untold)

    @property
    def in_reasoning(self) -> bool:
        return self._thinking.in_reasoning

    @property
    def stopped_by(self) -> str | None:
        return self._stops.matched

    @property
    def untold(self) -> tuple[TokenLogprob, ...]:
        """At the end, log probabilities without text."""
        return (*self._text_alignment.rest(), *self._decoded.rest())

    def cut_character(self) -> None:
        """Drop an incomplete character."""
        if self._thinking.in_reasoning:
            self._characters.drop()

    def begin(self, calls: bool) -> None:
        """Start the answer at the next token; `calls`: it has tool calls."""
        self._thinking.begin_answer()
        if not calls:
            self._calls = None

    def end(self) -> None:
        self.finish_reason = self.finish_reason or "stop"

    def finish(self, reason: FinishReason) -> Iterator[Event]:
        """Yield held-back events at the end."""
        over = self._is_cut
        self.finish_reason = self.finish_reason or reason
        if not over:
            leftover = self._characters.finish()
            self._decoded.add(len(leftover), None)
            pieces = self._thinking.feed(-1, leftover) if leftover else []
            yield from self._pieces([*pieces, *self._thinking.finish()])
        if not self._is_cut:
            yield from self._text(self._stops.finish())
        if self._calls is not None and not (self._called and self._one_call):
            yield from self._answer_pieces(self._calls.finish())
        if self._called and self.finish_reason == "stop":
            self.finish_reason = "tool_calls"

    _is_cut = False  # by a stop string, or after the only allowed call: nothing further is shown

    def _pieces(self, pieces: Sequence[Piece]) -> Iterator[Event]:
        for kind, text in pieces:
            shares = self._decoded.take(text)
            if kind == "reasoning":
                yield self._event("reasoning", text, [entry for _, entry in shares])
                continue
            for length, entry in shares:
                self._text_alignment.add(length, entry)
            is_early = self.tokens <= self._min_tokens
            shown, matched = (self._stops.skip(text), False) if is_early else self._stops.push(text)
            yield from self._text(shown)
            if matched:
                self._is_cut = True
                self.finish_reason = "stop"
            if self._is_cut:
                return

    def _text(self, text: Span) -> Iterator[Event]:
        if self._calls is not None:
            yield from self._answer_pieces(self._calls.push(text))
        elif text:
            yield from self._answer_pieces([text])

    def _answer_pieces(self, pieces: Sequence[Span | ToolCall | CallPart]) -> Iterator[Event]:
        for piece in pieces:
            if isinstance(piece, ToolCall):
                self._called = True
                yield Event("tool_call", tool_call=piece)
                if self._one_call:
                    self._is_cut = True
                    self.finish_reason = "stop"
                    return
            elif isinstance(piece, CallPart):
                begun = ToolCall(piece.id, piece.name, "")
                yield Event("tool_call_part", piece.text, begun_call=begun, tokens=self.tokens)
            elif piece:
                yield self._event("text", piece, [entry for _, entry in self._text_alignment.take(piece)])

    def _event(self, kind: EventKind, text: str, entries: Sequence[TokenLogprob | None]) -> Event:
        logprobs = tuple(entry for entry in entries if entry is not None)
        return Event(kind, str(text), tokens=self.tokens, logprobs=logprobs)
