"""Run one turn: render and save what the engine generates, and run tool calls."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from itertools import groupby, zip_longest
from typing import Literal, TypeAlias, cast

from notso.smollm3 import EngineLostError, Event, FinishReason, InvalidRequestError, Usage
from notso.web.engine.port import Request
from notso.web.engine.running import PreparedRequest, RunningRequest, RunningRequests, Submitter, submissions_for
from notso.web.rendering.budget import Budget
from notso.web.rendering.markdown import RENDERER_VERSION
from notso.web.rendering.streaming import Rendered, StreamingMarkdown
from notso.web.store.documents import Citation
from notso.web.store.protocol import AnswerStats, AnswerTrace, ChatStore, MessageState, StoredMessage, ToolUse
from notso.web.turns.answer_trace import TraceRecorder, message_before_run, replay_request
from notso.web.turns.citations import locate_citations
from notso.web.turns.every_part import DocumentPart, answer_parts
from notso.web.turns.prompt import continuation_request, split_at_tool_calls
from notso.web.turns.status_line import StatusLine, TurnStats
from notso.web.turns.tool_calls import MAX_ROUNDS, ToolCalls
from notso.web.turns.turn import Turn
from notso.web.turns.turn_log import CHANNELS, AnswerStatus, Card, ChannelName
from notso.web.values.errors import NotsoError, StorageError
from notso.web.values.fair_queue import FairQueue
from notso.web.values.wording import translated, words

logger = logging.getLogger("notso.web.turns")

Segment: TypeAlias = tuple[ChannelName, str] | ToolUse
"""Unit of rendering: text of a channel, or a tool call."""

EVENT_BATCH_SECONDS = 0.05
TICK_SECONDS = 0.1
SAVE_SECONDS = 1.0
SAVE_RETRY_SECONDS = (0.5, 1.0, 2.0, 4.0)
AWAY_RETRY_SECONDS = (4.0,) * 8  # further retries for a shared database, which may be restarting


class TurnConsumer:
    def __init__(
        self,
        store: ChatStore,
        renderer: FairQueue,
        max_characters: int,
        requests: RunningRequests,
        card: Callable[[ToolUse], Card],
        turn: Turn,
        running: RunningRequest,
        prepared: PreparedRequest | None,
    ) -> None:
        self.turn = turn
        trace, is_recorded = turn.trace, turn.request.options.token_ids
        self._recorder = TraceRecorder(trace, is_counted=turn.is_taken_over) if is_recorded else None
        unfinished = self._recorder if self._recorder is not None and self._recorder.is_within_run else None
        begun = message_before_run(unfinished.last, turn.message) if unfinished is not None else turn.message
        self.calls = ToolCalls(turn.offer, begun.tool_uses, self._show_call, may_repeat=not turn.is_taken_over)
        self.running = running
        self.finish_reason: FinishReason | None = None
        self._store = store
        self._renderer = renderer
        self._requests = requests
        self._card = card
        self._usages: list[Usage] = []
        self._max_characters = max_characters
        self._budget = Budget()
        self._replaying: StoredMessage | None = None  # partial answer, shown until its tokens have been replayed
        self._save_soon = False
        is_between_runs = unfinished is None and bool(trace.runs)
        self._reset_text(begun, is_apart=is_between_runs or (unfinished is not None and unfinished.last.is_apart))
        self._earlier_stats = begun.numbers if any(self._text.values()) or self.calls.uses else AnswerStats()
        self._status_line = StatusLine(
            time.monotonic(),
            reasoning_before_s=self._earlier_stats.thinking_ms / 1000,
            reasoning_tokens_before=self._earlier_stats.reasoning_tokens,
            omitted_messages=turn.omitted_messages,
        )
        self._note = ""
        self._failure: BaseException | None = None
        self._ended = False
        self._wake = asyncio.Event()
        self._last_save = time.monotonic()
        self._event_task: asyncio.Task[None] | None = None
        self._part_requests: list[RunningRequest] = []
        if unfinished is not None:
            self._resend_last_run(unfinished, running)
        elif self.calls.open:
            running.close()  # not needed yet: pending tool calls run before the next engine request
        elif turn.parts:
            running.close()  # not needed: each part has its own request
            self._event_task = asyncio.create_task(self._consume_parts(turn.parts))
        else:
            request = continuation_request(turn.request, turn.message, keep_thinking=turn.keep_thinking)
            self._begin_run(self._with_remaining_limits(request) if trace.runs else request, turn.message, prepared)

    @property
    def usage(self) -> Usage | None:
        if not self._usages:
            return None
        return Usage(**{each.name: sum(getattr(usage, each.name) for usage in self._usages) for each in fields(Usage)})

    @property
    def stats(self) -> TurnStats:
        budget = self.turn.request.params.thinking_budget if self.turn.request.options.thinking else None
        return self._status_line.stats(time.monotonic(), budget)

    def consume(self, events: list[Event]) -> None:
        now = time.monotonic()
        for event in events:
            self._status_line.consume(event, now)
            if self._recorder is not None and event.kind in ("started", "tokens", "usage", "end"):
                # Save soon when the trace's `tries` changes: at the start of a run and at the first token of a retry.
                self._save_soon = self._save_soon or event.kind == "started" or self._recorder.is_retrying
                self._recorder.consume(event)
            match event.kind:
                case "progress":
                    self._replaying = None
                case "reasoning":
                    if self.turn.hurry:
                        self.running.answer_now()
                    self._add("reasoning", event.text)
                case "text":
                    self._add("answer", event.text)
                case "tool_call" if event.tool_call is not None:
                    at = len(self._text["answer"]), len(self._text["reasoning"])
                    self._unrendered.append(self.calls.add(event.tool_call, *at))
                    self._separate_next.add("answer")
                    self._after_call = True
                case "usage" if event.usage is not None:
                    self._usages.append(event.usage)
                    self.turn.last_usage = event.usage
                case "error":
                    self._failure = event.error
                case "end":
                    self._replaying = None
                    self.finish_reason = event.finish_reason
                    if event.finish_reason == "length":
                        self._note = words["note_length"]
        self._wake.set()

    def stop(self, by: Literal["", "user"] = "") -> None:
        """Stop generation, a tool, or a wait for permission."""
        for running in (self.running, *self._part_requests):
            running.stop(by)
        self.calls.stop()

    async def run(self) -> None:
        await self._render_existing()
        continues = True
        if self._event_task is not None:
            continues = await self._follow_engine()
        while continues and self.calls.open:
            continues = await self._use_tools() and await self._follow_engine()
        await self._finish()

    async def fail(self) -> None:
        """End the turn after an unexpected error in `run`, and save the text so far."""
        self.stop()
        turn = self.turn
        if turn.message.active:  # otherwise, `message` is already final
            self.calls.abandon()
            partial = self._replaying or self._message("failed")
            note = words["failed_inside"]
            turn.message, turn.trace = replace(partial, state="failed", note=note, renderer=0), self._trace
        turn.is_unsaved = True
        turn.is_unsaved = not await self._save_final(turn.message, turn.trace)

    async def _follow_engine(self) -> bool:
        # Waits for the end of the engine request. Returns True if it ended with tool calls.
        while not self._ended:
            await self._wake.wait()
            self._wake.clear()
            if self._ended:
                break
            started = time.monotonic()
            self._update_status()
            if self._replaying is None:
                await self._render_more()
            if self._save_soon or started - self._last_save >= SAVE_SECONDS:
                await self._save_partial()
            spent = time.monotonic() - started
            # Spend at most a quarter of the time on rendering and saving.
            await self._pause(max(TICK_SECONDS, 4 * spent) - spent)
        recorder = self._recorder
        can_continue = recorder is not None and recorder.can_continue and not self.turn.cancelled
        if recorder is not None and can_continue and isinstance(self._failure, EngineLostError):
            return await self._continue_on_next_engine(recorder)
        self._restore_unreplayed()
        self._status_line.end_reasoning(time.monotonic())
        await self._render_more()
        return self.finish_reason == "tool_calls" and not self.turn.cancelled

    async def _continue_on_next_engine(self, recorder: TraceRecorder) -> bool:
        logger.warning("another engine continues an answer: %s", self._failure)
        if self._replaying is None:
            self._replaying = self._message("running")
        begun = message_before_run(recorder.last, self._replaying)
        self._failure = None
        self.calls.uses = list(begun.tool_uses)
        self._reset_text(begun, is_apart=recorder.last.is_apart)
        self.turn.log.clear()
        self._resend_last_run(recorder, self._requests.open(self._owner, self.turn.id))
        await self._render_existing()
        return await self._follow_engine()

    def _resend_last_run(self, recorder: TraceRecorder, running: RunningRequest) -> None:
        run, message = recorder.last, self._replaying or self.turn.message
        self._replaying, self.running = message, running
        request = replay_request(run, self.turn.request, message, keep_thinking=self.turn.keep_thinking)
        self._send(request, hurry=run.hurry)

    def _reset_text(self, message: StoredMessage, *, is_apart: bool = False) -> None:
        self._text: dict[ChannelName, str] = {"reasoning": message.reasoning, "answer": message.content}
        self._unrendered = _segments_of(message)
        self._separate_next: set[ChannelName] = set(CHANNELS) if self.calls.open or is_apart else set()
        self._after_call = bool(message.tool_uses) and not split_at_tool_calls(message)[-1]
        self._remaining_characters = {name: self._max_characters - len(text) for name, text in self._text.items()}
        self._markdown = {name: StreamingMarkdown(self._budget) for name in CHANNELS}

    async def _render_existing(self) -> None:
        segments, shown = self._unrendered, self._replaying
        await self._render_more()
        if shown is None:
            return
        # Until the engine has replayed the answer's tokens, show the rest of the text as a tail, which may change.
        for channel in CHANNELS:
            calls = [at for at, each in enumerate(segments) if isinstance(each, ToolUse)] if channel == "answer" else []
            after_calls = segments[calls[-1] + 1 :] if calls else segments
            begun = "".join(each[1] for each in after_calls if not isinstance(each, ToolUse) and each[0] == channel)
            full_text = shown.content if channel == "answer" else shown.reasoning
            rest = full_text[len(self._text[channel]) :]
            if rest:
                await self._preview(channel, begun, rest)

    async def _preview(self, channel: ChannelName, begun: str, rest: str) -> None:
        def render() -> str:
            markdown = StreamingMarkdown(self._budget)
            markdown.feed(begun)  # the closed blocks of `begun` are already in the log
            shown = markdown.feed(rest)
            return shown.closed + shown.tail

        self.turn.log.write(channel, "", await self._renderer.run(self._owner, render))

    def _restore_unreplayed(self) -> None:
        # If the engine request ended before the partial answer was replayed, keep the partial answer.
        if self._replaying is not None:
            self._reset_text(self._replaying)
            self.calls.uses = list(self._replaying.tool_uses)
            self._replaying = None
            self.turn.log.clear()

    async def _use_tools(self) -> bool:
        # Returns False if the turn is over.
        if self.calls.spent:
            self._note = words["note_tool_rounds"].format(rounds=MAX_ROUNDS)
            return False
        self.finish_reason = None
        if self.turn.cancelled or not await self.calls.finalize(len(self._text["answer"])) or self.turn.cancelled:
            return False
        self._separate_next |= set(CHANNELS)
        self._status_line = self._status_line.next_round(time.monotonic())
        so_far = self._message("running")
        request = continuation_request(self.turn.request, so_far, keep_thinking=self.turn.keep_thinking)
        self.running = self._requests.open(self._owner, self.turn.id)
        self._begin_run(self._with_remaining_limits(request), so_far)
        return True

    def _begin_run(self, request: Request, message: StoredMessage, prepared: PreparedRequest | None = None) -> None:
        if self._recorder is not None:
            self._recorder.begin(request, message, hurry=self.turn.hurry, is_apart=bool(self._separate_next))
        self._send(request, prepared, hurry=self.turn.hurry)

    def _send(self, request: Request, prepared: PreparedRequest | None = None, *, hurry: bool) -> None:
        if hurry:
            self.running.answer_now()
        self._ended = False
        if not self._requests.host.model(request.model).accepts_requests:
            loading = replace(self.turn.log.status, phase="loading", label=words["phase_loading"])
            self.turn.log.set_status(loading)
        self._event_task = asyncio.create_task(
            self._consume_events(self.running, submissions_for(request, prepared), request.model)
        )

    async def _consume_events(self, running: RunningRequest, submit: Submitter, model: str | None) -> None:
        with self._recording_end("request"), contextlib.closing(running):
            saving = [self._save_partial()] if self._recorder is not None else []
            results = await asyncio.gather(running.begin(submit, model=model), *saving, return_exceptions=True)
            for failure in filter(None, results):
                raise failure
            async for _, events in running.events(pace_s=EVENT_BATCH_SECONDS):
                if self._recorder is not None and self._recorder.is_retrying:
                    # The first new token resets `tries`. Save the reset at once, because a later token may crash the
                    # process again.
                    first = next((at for at, event in enumerate(events, 1) if event.kind == "tokens"), 0)
                    self.consume(events[:first])
                    if first:
                        await self._save_partial()
                    events = events[first:]
                self.consume(events)

    async def _consume_parts(self, parts: Sequence[DocumentPart]) -> None:
        answered = 0

        def opened(running: RunningRequest) -> None:
            running.name = self.turn.id
            self._part_requests.append(running)

        with self._recording_end("part"):
            async for event in answer_parts(self._requests, parts, opened, lambda: self.turn.cancelled):
                self.consume([event])
                if event.kind == "text" and answered < len(parts):  # a text event contains the whole answer for a part
                    answered += 1
                    if answered > self.turn.trace.parts:
                        self.turn.trace = replace(self.turn.trace, parts=answered, tries=1)
                        await self._save_partial()

    @contextlib.contextmanager
    def _recording_end(self, what: str) -> Iterator[None]:
        try:
            yield
        except NotsoError as error:
            self._failure = error
        except Exception as error:
            logger.exception("the engine failed on a %s", what)
            self._failure = error
        finally:
            self._ended = True
            self._wake.set()

    def _with_remaining_limits(self, request: Request) -> Request:
        # Token limits apply to the whole answer, so subtract the tokens of earlier requests.
        used, params = self.usage or Usage(0, 0), request.params
        if self._recorder is not None and self._recorder.trace.runs:
            params, used = self._recorder.last_params, self._recorder.last_usage
        most, budget = params.max_tokens, params.thinking_budget
        if most is not None:
            params = replace(params, max_tokens=max(1, most - used.completion_tokens))
        if budget is not None:
            params = replace(params, thinking_budget=max(0, budget - used.reasoning_tokens))
        return replace(request, params=params)

    async def _show_call(self, use: ToolUse, waits_for: str) -> None:
        # Save the call before showing it, asking for permission, or running the tool.
        await self._save_partial()
        await self._put_card(use)
        if not self.turn.cancelled and not use.is_final:
            phase = "tool" if not waits_for else "asking" if use.state == "waiting" else "question"
            label = words[f"phase_{phase}"].format(name=use.name)
            self.turn.log.set_status(AnswerStatus(phase, label, self.turn.log.status.reasoning_label))
        self.turn.log.ask(waits_for)

    def _add(self, channel: ChannelName, text: str) -> None:
        if channel in self._separate_next:  # a call separates this text from the preceding text
            text = text.lstrip("\n")
            if not text:
                return
            self._separate_next.discard(channel)
            between = "\n\n" if self._text[channel] else ""
            self._text[channel] += between
            if channel == "reasoning" or not self._after_call:  # if not, the call's card separates the texts
                self._unrendered.append((channel, between))
        text = text[: max(0, self._remaining_characters[channel])]
        self._remaining_characters[channel] -= len(text)
        self._text[channel] += text
        self._unrendered.append((channel, text))
        self._after_call = self._after_call and channel != "answer"
        if self._remaining_characters[channel] <= 0:
            self._note = words["note_length"]
            self.turn.cancelled = True
            self.running.stop()

    def _update_status(self) -> None:
        if not self.turn.cancelled:
            self.turn.log.set_status(self._status_line.status(time.monotonic()))

    async def _render_more(self) -> None:
        segments, self._unrendered = self._unrendered, []
        for segment in _merge_segments(segments):
            if isinstance(segment, ToolUse):
                await self._render("answer", StreamingMarkdown.finish)
                self._markdown["answer"] = StreamingMarkdown(self._budget)
                await self._put_card(segment)
            else:
                channel, text = segment
                await self._render(channel, lambda md, text=text: md.feed(text))  # type: ignore[misc]

    async def _render(self, channel: ChannelName, step: Callable[[StreamingMarkdown], Rendered]) -> None:
        rendered = await self._renderer.run(self._owner, lambda: step(self._markdown[channel]))
        self.turn.log.write(channel, rendered.closed, rendered.tail)

    @property
    def _trace(self) -> AnswerTrace:
        return self._recorder.trace if self._recorder is not None else self.turn.trace

    @property
    def _owner(self) -> str:
        return self.turn.request.options.owner

    async def _put_card(self, use: ToolUse) -> None:
        self.turn.log.put_card(use.id, await self._renderer.run(self._owner, partial(self._card, use)))

    async def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._ended and (left := deadline - time.monotonic()) > 0:
            # Sleep in short steps, so that the end of the engine request is noticed soon.
            await asyncio.sleep(min(left, 0.02))

    async def _save_partial(self) -> None:
        self._last_save, self._save_soon = time.monotonic(), False
        message = self._replaying or self._message("running")
        try:
            await self._store.save_message(replace(message, state="running", renderer=0), self._owner, self._trace)
        except StorageError as error:
            logger.warning("a partial response was not saved: %s", error)

    async def _finish(self) -> None:
        for channel in CHANNELS:
            await self._render(channel, StreamingMarkdown.finish)
        state, note = self._outcome()
        log = self.turn.log
        log.ask("")
        trace = self._trace
        is_handed_over = state == "interrupted" and self.turn.is_handed_over
        for use in [] if is_handed_over else self.calls.abandon():
            await self._put_card(use)
        self._note = note
        message = replace(
            self._message(state),
            answer_html=log.html("answer"),
            reasoning_html=log.html("reasoning"),
            renderer=RENDERER_VERSION,
        )
        message = replace(message, citations=await self._citations(message.content))
        self.turn.message, self.turn.trace = message, trace
        log.words = len(message.content.split())
        error = note if state == "failed" else None
        if is_handed_over:  # another process continues the answer; this try does not count, because there was no crash
            message, trace = replace(message, state="running", renderer=0), replace(trace, tries=0)
        if not await self._save_final(message, trace):
            self.turn.is_unsaved = True
            state, error = "failed", words["failed_saving"]
        log.finish(state, words[f"phase_{state}"], error, asdict(message.numbers))

    async def _citations(self, answer: str) -> tuple[Citation, ...]:
        request = self.turn.parts[0].request if self.turn.parts else self.turn.request
        documents = [each.name for each in request.options.sources]
        try:
            return await locate_citations(self._store.documents, self._owner, answer, documents)
        except StorageError as error:
            logger.warning("the quotations of a response were not looked up: %s", error)
            return ()

    async def _save_final(self, message: StoredMessage, trace: AnswerTrace) -> bool:
        outage_pauses = AWAY_RETRY_SECONDS if self._store.is_shared else ()
        for pause in (*SAVE_RETRY_SECONDS, *outage_pauses, None):
            try:
                await self._store.save_message(message, self._owner, trace)
                return True
            except StorageError as error:
                logger.error("a response was not saved: %s", error)
                if pause is not None:
                    await asyncio.sleep(pause)
        return False

    def _outcome(self) -> tuple[MessageState, str]:
        if self._failure is not None and self.turn.interrupted:  # the server is stopping and the engine hangs
            return "interrupted", ""
        if isinstance(self._failure, InvalidRequestError) and self._failure.param == "replay":
            # The model, adapter or conversation has changed, so the tokens cannot be replayed. The Continue button can
            # still continue the text.
            return "interrupted", ""
        if isinstance(self._failure, NotsoError):
            return "failed", translated(self._failure)
        if self._failure is not None:
            return "failed", words["failed_inside"]
        is_complete = self.finish_reason in ("stop", "length")
        if self.turn.cancelled and not is_complete and not self._note:
            return "interrupted" if self.turn.interrupted else "stopped", ""
        if not is_complete and not self._note:  # the engine was shut down
            return "interrupted", ""
        return "done", self._note

    def _message(self, state: MessageState) -> StoredMessage:
        usage, before = self.usage or Usage(0, 0), self._earlier_stats
        numbers = AnswerStats(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=before.completion_tokens + usage.completion_tokens,
            reasoning_tokens=before.reasoning_tokens + usage.reasoning_tokens,
            prompt_ms=usage.prompt_ms,
            completion_ms=before.completion_ms + usage.completion_ms,
            thinking_ms=1000 * self._status_line.thinking_s,
            queue_ms=usage.queue_ms,
            first_token_ms=1000 * self._status_line.first_token_s or before.first_token_ms,
        )
        return replace(
            self.turn.message,
            content=self._text["answer"],
            reasoning=self._text["reasoning"],
            state=state,
            tool_uses=tuple(self.calls.uses),
            note=self._note,
            numbers=numbers,
            dropped_messages=self._status_line.dropped_messages,
        )


def _segments_of(message: StoredMessage) -> list[Segment]:
    segments: list[Segment] = [("reasoning", message.reasoning)]
    for text, use in zip_longest(split_at_tool_calls(message), message.tool_uses):
        segments.append(("answer", text))
        if use is not None:
            segments.append(use)
    return segments


def _merge_segments(segments: list[Segment]) -> Iterator[Segment]:
    for (is_call, channel), group in groupby(segments, key=_kind):
        if is_call:
            yield from group
        elif text := "".join(segment[1] for segment in group if not isinstance(segment, ToolUse)):
            yield cast(ChannelName, channel), text


def _kind(segment: Segment) -> tuple[bool, str]:
    return (True, segment.id) if isinstance(segment, ToolUse) else (False, segment[0])
