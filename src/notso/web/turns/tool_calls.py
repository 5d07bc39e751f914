"""Handle the tool calls of one turn: permission, execution and results."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from notso.smollm3 import Tool, ToolCall
from notso.web.store.protocol import ToolUse
from notso.web.tools.chat_tool import ChatTool, ToolContext
from notso.web.tools.elicitation import CANCELLED, MAX_QUESTIONS, QUESTION_SECONDS, Elicitation, Reply
from notso.web.tools.toolbox import use as run_tool
from notso.web.values.wording import words

PERMISSION_SECONDS = 300.0
MAX_ROUNDS = 8  # per answer; a round is a group of calls after which the model reads the results
MAX_CALLS = 8  # per round
MAX_ID_CHARACTERS = 64

Permission = Literal["once", "chat", "deny"]
PERMISSIONS: tuple[str, ...] = get_args(Permission)


@dataclass(frozen=True, slots=True)
class ToolOffer:
    """Tools that the model may call in a turn."""

    tools: tuple[ChatTool, ...]
    context: ToolContext
    granted: set[str] = field(default_factory=set)  # digests of tools that run without asking for permission
    grant: Callable[[ChatTool], Awaitable[None]] | None = None  # permits a tool in all later turns of the chat

    @property
    def definitions(self) -> list[Tool]:
        return [tool.definition for tool in self.tools]


class ToolCalls:
    """Runs the tool calls of a turn. Use on the event loop only."""

    def __init__(
        self,
        offer: ToolOffer | None,
        uses: Sequence[ToolUse],
        changed: Callable[[ToolUse, str], Awaitable[None]],
        *,
        may_repeat: bool = True,
    ) -> None:
        # If `may_repeat` is false, ask before repeating calls that were interrupted while running, even for granted
        # tools.
        self._interrupted_ids = frozenset(use.id for use in uses if use.state == "running" and not may_repeat)
        self.uses = [use if use.is_final else replace(use, state="waiting") for use in uses]
        self.asking: ToolUse | None = None
        self.question: Elicitation | None = None
        self._offer = offer
        # Receives each changed call, and the id of the permission or question for which it is waiting.
        self._changed = changed
        self._round = uses[-1].round + 1 if uses and uses[-1].is_final else uses[-1].round if uses else 0
        self._answer: asyncio.Future[Permission] | None = None
        self._reply: asyncio.Future[Reply] | None = None
        self._questions = 0  # number of questions asked by the running call
        self._update_lock = asyncio.Lock()
        self._running: asyncio.Task[None] | None = None

    @property
    def open(self) -> bool:
        return any(not use.is_final for use in self.uses)

    @property
    def spent(self) -> bool:
        """Whether more than MAX_ROUNDS rounds were used; every call of the additional round fails."""
        return self._round > MAX_ROUNDS

    def add(self, call: ToolCall, content_at: int, reasoning_at: int) -> ToolUse:
        # Permissions refer to a call by its id, so a repeated id gets a suffix.
        taken, id = {each.id for each in self.uses}, call.id
        while id in taken:
            id = f"{call.id[:MAX_ID_CHARACTERS]}-{secrets.token_hex(4)}"
        use = ToolUse(
            id, call.name, call.arguments, "waiting", self._round, content_at=content_at, reasoning_at=reasoning_at
        )
        self.uses.append(use)
        return use

    async def finalize(self, content_length: int) -> bool:
        """Run all open calls in order. Return False if they were stopped.

        `content_length` is the length of the answer so far.
        """
        self.uses = [
            replace(each, round_end=content_length) if each.round == self._round else each for each in self.uses
        ]
        self._running = asyncio.ensure_future(self._finalize())
        try:
            await asyncio.wait([self._running])
            if not self._running.cancelled():
                self._running.result()
        finally:
            self._running = None
            self.asking = None
        self._round += 1
        return not self.open

    def stop(self) -> None:
        if self._running is not None:
            self._running.cancel()

    def abandon(self) -> list[ToolUse]:
        """Mark open calls as interrupted, and return them."""
        pending_ids = {use.id for use in self.uses if not use.is_final}
        self.uses = [replace(use, state="interrupted") if use.id in pending_ids else use for use in self.uses]
        return [use for use in self.uses if use.id in pending_ids]

    def permit(self, call_id: str, permission: Permission) -> bool:
        """Answer the call's permission request. Return False if it is not pending."""
        if self.asking is None or self.asking.id != call_id or self._answer is None or self._answer.done():
            return False
        self._answer.set_result(permission)
        return True

    def reply(self, question_id: str, reply: Reply) -> bool:
        """Answer a tool's question. Return False if it is not pending."""
        if self.question is None or self.question.id != question_id or self._reply is None or self._reply.done():
            return False
        self._reply.set_result(reply)
        self.question = self.asking = None
        return True

    async def _finalize(self) -> None:
        pending = [(at, use) for at, use in enumerate(self.uses) if not use.is_final]
        for number, (at, use) in enumerate(pending):
            if number >= MAX_CALLS or self._round == MAX_ROUNDS:
                await self._update_call(at, replace(use, state="failed", result=words["tool_says_too_many"]))
            else:
                await self._run_call(at, use)

    async def _run_call(self, at: int, use: ToolUse) -> None:
        tools = self._offer.tools if self._offer is not None else ()
        tool = next((tool for tool in tools if tool.name == use.name), None)
        if tool is None or self._offer is None:
            names = ", ".join(tool.name for tool in tools) or words["tool_says_none"]
            result = words["tool_says_unknown"].format(names=names)
            await self._update_call(at, replace(use, state="failed", result=result))
            return
        # Ask before repeating an interrupted call, because it may have had an effect.
        is_repeated = use.id in self._interrupted_ids and tool.origin != ""
        if tool.always_asks or is_repeated or tool.digest not in self._offer.granted:
            refusal = await self._request_permission(at, use, self._offer, tool)
            if refusal:
                await self._update_call(at, replace(use, state="denied", result=refusal))
                return
        await self._update_call(at, replace(use, state="running"))
        self._questions = 0
        context = replace(self._offer.context, ask=lambda question: self._ask_user(at, question))
        try:
            outcome = await run_tool(tool, use.arguments, context)
        finally:
            self._cancel_question()
        await self._update_call(
            at, replace(use, state=outcome.state, result=outcome.text, duration_ms=outcome.duration_ms)
        )

    async def _request_permission(self, at: int, use: ToolUse, offer: ToolOffer, tool: ChatTool) -> str:
        # Returns '' if the call is permitted, otherwise the result for the model.
        self._answer = asyncio.get_running_loop().create_future()
        try:
            await self._update_call(at, use, use.id)
            self.asking = use
            async with asyncio.timeout(PERMISSION_SECONDS):
                permission = await self._answer
        except TimeoutError:
            return words["tool_says_unanswered"].format(minutes=round(PERMISSION_SECONDS / 60))
        finally:
            self.asking = self._answer = None
        if permission == "chat" and not tool.always_asks:
            offer.granted.add(tool.digest)
            if offer.grant is not None:
                await offer.grant(tool)
        return words["tool_says_denied"] if permission == "deny" else ""

    async def _ask_user(self, at: int, question: Elicitation) -> Reply:
        use = self.uses[at]
        # A tool server may request input even after its call has ended.
        if use.state != "running" or self._reply is not None or self._questions == MAX_QUESTIONS:
            return CANCELLED
        self._questions += 1
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._reply = reply
        self.asking, self.question = use, replace(question, id=f"{use.id}-{self._questions}")
        try:
            await self._update_call(at, use, self.question.id, reply)
            async with asyncio.timeout(QUESTION_SECONDS):
                answer = await reply
        except TimeoutError:
            answer = CANCELLED
        finally:
            if is_open := self._reply is reply:
                self._cancel_question()
        if is_open:
            await self._update_call(at, use)
        return answer

    def _cancel_question(self) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(CANCELLED)
        self._reply = self.question = self.asking = None

    async def _update_call(
        self, at: int, use: ToolUse, waits_for: str = "", reply: asyncio.Future[Reply] | None = None
    ) -> None:
        # Updates are serialized, because a question may arrive during the call's own updates. The update for a question
        # that has been withdrawn is skipped.
        async with self._update_lock:
            if reply is self._reply or reply is None:
                self.uses[at] = use
                await self._changed(use, waits_for)
