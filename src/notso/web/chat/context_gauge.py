"""Measure a chat's context usage and the cost of its draft, and summarize long chats (compaction).

Compaction is optional. While the engine is idle, the model summarizes chats that use at least 70% of their context. As
with /summarize, prompts then contain the summary in place of the earlier messages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from notso.smollm3 import ContextLengthError, Message, ModelError, RequestOptions, WhenFull, dropped_parts
from notso.web.chat.chat_view import read_branch
from notso.web.chat.services import ChatServices, ChatUser, engine_and_registry
from notso.web.chat.submit import new_summary, summary_request
from notso.web.chat.suggestions import IdleRequests
from notso.web.engine.model_names import resolve_model_choice
from notso.web.engine.port import ChatEngine
from notso.web.store.protocol import NewMessage, StoredMessage, TurnAccepted
from notso.web.turns.chat_settings import ChatSettings
from notso.web.turns.documents import NO_DOCUMENTS, PromptDocuments
from notso.web.turns.prompt import SUMMARY_HEADING, prompt_messages
from notso.web.turns.turn import Turn
from notso.web.values.errors import NotsoError, Problem
from notso.web.values.ids import new_id

PARTS = ("system", "tools", "summary", "thinking", "history", "results", "attachments", "draft")
Level = Literal["ok", "warn", "bad"]

WARN_PERCENT, BAD_PERCENT = 70, 90


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextGauge:
    used: int
    total: int
    parts: Mapping[str, int]
    prefill_tokens: int  # number of tokens that are not cached; processing them takes about `seconds`
    seconds: float | None
    when_full: WhenFull
    offers_summary: bool
    dropped: tuple[str, ...] = ()
    """Descriptions of content that the chat template omits."""
    at_least: bool = False  # whether `used` is a lower bound, because the prompt was too long to count

    @property
    def percent(self) -> int:
        return min(100, -(-100 * self.used // self.total)) if self.total else 0

    @property
    def level(self) -> Level:
        return "ok" if self.percent < WARN_PERCENT else "warn" if self.percent <= BAD_PERCENT else "bad"

    @property
    def fits(self) -> bool:
        # At least one token must be left for the answer.
        return self.used < self.total


@dataclass(frozen=True, slots=True)
class DraftPrompt:
    """The prompt of a branch followed by a draft. Its methods block."""

    line: Sequence[StoredMessage]
    draft: StoredMessage
    settings: ChatSettings
    options: RequestOptions
    documents: PromptDocuments

    def measure(self, engine: ChatEngine) -> ContextGauge:
        """Measure the context usage. Raises ModelError."""
        messages = self._messages(self.draft)
        options = self.documents.options(messages, self.options)
        total, settings = engine.info.context_of(options), self.settings
        gauge = partial(
            ContextGauge, total=total, when_full=settings.when_full, offers_summary=settings.compaction == "ask"
        )
        try:
            estimate = engine.estimate(messages, options)
        except ContextLengthError as error:
            used = error.needed_tokens
            parts = dict.fromkeys(PARTS, 0) | {"history": used}
            return gauge(used=used, parts=parts, prefill_tokens=used, seconds=None, at_least=True)
        used = estimate.prompt_tokens
        roles = [each.role for each in messages]
        dropped = dropped_parts(engine.info.template_drops, roles, messages[0].content, bool(options.tools))
        return gauge(
            used=used,
            parts=self._measure_parts(engine, messages, options, used),
            prefill_tokens=used - estimate.cached_tokens,
            seconds=estimate.seconds,
            dropped=tuple(dropped),
        )

    def prefill(self, engine: ChatEngine) -> None:
        """Process the prompt before the user sends the draft (speculative prefill)."""
        messages = self._messages(self.draft)
        # A draft that cannot be processed causes an error when it is sent, not while it is typed.
        with contextlib.suppress(ModelError):
            options = self.documents.options(messages, self.options)
            engine.speculative_prefill(messages, self.settings.sampling, options)

    def _messages(self, draft: StoredMessage, documents: PromptDocuments | None = None) -> tuple[Message, ...]:
        return prompt_messages([*self.line, draft], self.settings, documents or self.documents)

    def _measure_parts(
        self, engine: ChatEngine, messages: Sequence[Message], options: RequestOptions, used: int
    ) -> dict[str, int]:
        # Each part is the difference between two counts, because the template adds tokens around every message.
        draft, documents, system_prompt = self.draft, self.documents, self.settings.system_prompt
        count = partial(engine.count_tokens, options=replace(options, prefix=None))
        empty_draft, empty_prompt = replace(draft, content="", attachments=()), (Message("user", ""),)
        without_draft = self._messages(empty_draft)
        plain_messages = self._messages(empty_draft, PromptDocuments(instructions=documents.instructions))
        system = plain_messages[0] if plain_messages[0].role == "system" else None
        reasoning = 0
        if any(each.keep_reasoning for each in messages):
            reasoning = used - count([replace(each, keep_reasoning=False) for each in messages])
        no_draft = count(without_draft) if draft.content or draft.attachments else used
        no_text = count(self._messages(replace(draft, content=""))) if draft.attachments else no_draft
        in_documents = no_draft - count(plain_messages) if documents is not NO_DOCUMENTS else 0
        empty_count = count(empty_prompt)
        with_system = count((system, *empty_prompt)) if system is not None else empty_count
        summary = 0
        if system is not None and SUMMARY_HEADING in system.content:
            plain = replace(system, content=system_prompt)
            summary = with_system - (count((plain, *empty_prompt)) if system_prompt.strip() else empty_count)
        tools = 0
        if options.tools:
            tools = empty_count - engine.count_tokens(empty_prompt, replace(options, tools=None, prefix=None))
        words_only = [replace(each, tool_calls=()) for each in without_draft if each.role != "tool"]
        results = no_draft - count(words_only) if len(words_only) < len(without_draft) else 0
        return {
            "system": with_system - summary - tools,
            "tools": tools,
            "summary": summary,
            "thinking": reasoning,
            "history": no_draft - with_system - reasoning - results - in_documents,
            "results": results,
            "attachments": no_text - no_draft + in_documents,
            "draft": used - no_text,
        }


AFTER_SECONDS = 5.0  # delay, so that titles and suggestions are generated first
PATIENCE_SECONDS = 300.0  # time limit for waiting until the engine is idle, and also for generating the summary


class Compaction:
    """Summarizes long chats while the engine is idle; a new turn cancels the summary. Runs on the event loop."""

    def __init__(self, services: ChatServices) -> None:
        self._services = services
        self._requests = IdleRequests(services.shared.requests, services.turns)

    def schedule_if_needed(self, turn: Turn) -> None:
        """Compact the turn's chat in the background if the chat is long and compaction is automatic."""
        engine = self._services.shared.engine.model(turn.request.model).engine
        # An answer with tool calls consists of several requests. The last one contains the whole chat, so use its token
        # counts.
        usage = turn.last_usage
        if usage is None or engine is None or (turn.message.kind, turn.message.state) != ("turn", "done"):
            return
        used, total = usage.prompt_tokens + usage.completion_tokens, engine.info.context_of(turn.request.options)
        if 100 * used >= WARN_PERCENT * total:
            self._requests.start(self._compact(turn))

    async def _compact(self, turn: Turn) -> None:
        user, last = ChatUser(self._services, turn.request.options.owner), turn.message
        with contextlib.suppress(NotsoError, Problem):
            view = await read_branch(user, last.chat_id, last.id)
            if view.settings.compaction != "automatic":
                return
            if not await self._requests.wait_until_idle(AFTER_SECONDS, PATIENCE_SECONDS):
                return
            choice = await resolve_model_choice(*engine_and_registry(user.services), view.settings.model)
            request = await summary_request(user, view, choice, priority="background")
            text = (await self._requests.generate(request, PATIENCE_SECONDS) or "").strip()
            if not text:
                return
            summary = replace(new_summary(view.chat), content=text, state="done", generation_id=None)
            stored = await user.store.add_message(user.owner, NewMessage(summary, last.id, new_id()))
            if isinstance(stored, TurnAccepted):  # otherwise the chat has been continued or deleted
                user.services.feed.announce(user.owner, last.chat_id, "")
