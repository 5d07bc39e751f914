"""Suggested follow-up questions, generated while the engine is idle and canceled when a chat turn starts."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace

from notso.web.engine.model_names import DEFAULT_MODEL, ModelChoice
from notso.web.engine.port import Message, Request, RequestOptions, Tool
from notso.web.engine.running import RunningRequest, RunningRequests, submissions_for
from notso.web.store.protocol import Chat, StoredMessage
from notso.web.turns.chat_settings import ChatSettings
from notso.web.turns.documents import NO_DOCUMENTS, PromptDocuments
from notso.web.turns.prompt import prompt_messages
from notso.web.turns.turns import Turns
from notso.web.values.errors import NotsoError

REQUEST = "Suggest three short questions I could ask next. Write one question per line and nothing else."
MAX_SUGGESTIONS = 3
MIN_SUGGESTIONS = 2
MAX_TOKENS = 60
MAX_CHARACTERS = 100
WAIT_SECONDS = 30.0
POLL_SECONDS = 0.25
MAX_REMEMBERED = 64

_BULLET = re.compile(r"^\s*(?:[-*•]|\d+[.)])\s*")


class Suggestions:
    """Generates suggestions for one chat at a time. Runs on the event loop."""

    def __init__(self, requests: RunningRequests, turns: Turns) -> None:
        self._requests = requests
        self._turns = turns
        self._running: RunningRequest | None = None
        self._cached: OrderedDict[tuple[str, int], list[str]] = OrderedDict()
        turns.at_start.append(lambda turn: self.cancel())

    @property
    def is_idle(self) -> bool:
        loaded = [served.engine.stats() for served in self._requests.host.loaded() if served.engine is not None]
        return bool(loaded) and sum(stats.running + stats.waiting for stats in loaded) + self._turns.unfinished == 0

    async def wait_until_idle(self, after_seconds: float, patience_seconds: float) -> bool:
        """Wait `after_seconds`, and then until the engine is idle; return False after `patience_seconds`."""
        await asyncio.sleep(after_seconds)
        for _ in range(int(patience_seconds / POLL_SECONDS)):
            if self.is_idle:
                return True
            await asyncio.sleep(POLL_SECONDS)
        return False

    def cancel(self) -> None:
        if self._running is not None:
            self._running.stop()
            self._running = None

    async def suggest(
        self,
        owner: str,
        chat: Chat,
        line: Sequence[StoredMessage],
        settings: ChatSettings,
        tools: list[Tool] | None = None,
        conversation: str | None = None,
        choice: ModelChoice = DEFAULT_MODEL,
        documents: PromptDocuments = NO_DOCUMENTS,
    ) -> list[str]:
        """Return follow-up questions for a branch, or an empty list, for example if the engine is busy."""
        # The key includes the text, because an edited or continued answer keeps its id.
        key = line[-1].id, hash(line[-1].content)
        if not settings.suggestions:
            return []
        if key in self._cached:
            return self._cached[key]
        if not self.is_idle:
            return []
        messages = await asyncio.to_thread(
            prompt_messages,
            line,
            settings.system_prompt,
            keep_thinking=settings.keep_thinking,
            documents=documents,
        )
        # The tools cannot be called. They are included so that the prompt begins like the chat's cached prompt.
        text = await self._generate(owner, chat, messages, settings, tools, conversation, choice, documents)
        if text is None:
            return []
        self._cached[key] = parse_questions(text)
        if len(self._cached) > MAX_REMEMBERED:
            self._cached.popitem(last=False)
        return self._cached[key]

    async def _generate(
        self,
        owner: str,
        chat: Chat,
        messages: tuple[Message, ...],
        settings: ChatSettings,
        tools: list[Tool] | None,
        conversation: str | None,
        choice: ModelChoice,
        documents: PromptDocuments,
    ) -> str | None:
        self.cancel()
        params = replace(settings.sampling, max_tokens=MAX_TOKENS, thinking_budget=0)
        options = RequestOptions(
            thinking=chat.thinking,  # as in the chat, so that the chat's cached prompt can be reused
            tools=tools,
            tool_choice="none",
            date=chat.prompt_date,
            priority="background",
            owner=owner,
            conversation=conversation,
            adapter=choice.adapter,
        )
        messages = (*messages, Message("user", REQUEST))
        request = Request(messages, params, documents.options(messages, options), choice.model)

        def on_start(running: RunningRequest) -> None:
            self._running = running

        return await generate_text(self._requests, request, WAIT_SECONDS, on_start)


def parse_questions(text: str) -> list[str]:
    found: list[str] = []
    for line in text.splitlines():
        question = _BULLET.sub("", line).strip().strip("\"'*_“”")
        if question.endswith("?") and 4 <= len(question) <= MAX_CHARACTERS and question not in found:
            found.append(question)
    return found[:MAX_SUGGESTIONS] if len(found) >= MIN_SUGGESTIONS else []


async def generate_text(
    requests: RunningRequests, request: Request, seconds: float, on_start: Callable[[RunningRequest], None]
) -> str | None:
    """Return the whole answer, or None if it is stopped, fails or takes longer than `seconds`.

    on_start: called with the running request, so that the caller can stop it.
    """
    running = requests.open(request.options.owner, counts=False)
    on_start(running)
    text, finished = "", False
    try:
        async with asyncio.timeout(seconds):
            await running.begin(submissions_for(request), model=request.model)
            async for _, events in running.events():
                text += "".join(event.text for event in events if event.kind == "text")
                finished = finished or any(event.finish_reason in ("stop", "length") for event in events)
    except (TimeoutError, NotsoError):
        return None
    finally:
        running.close()
    return text if finished else None
