"""State of a terminal conversation: messages, settings and context usage."""

from __future__ import annotations

import dataclasses
import secrets
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from notso.cli import terminal
from notso.cli.interruption import Interruption
from notso.cli.message_printer import MessagePrinter, PrintedMessage, collect

if TYPE_CHECKING:
    from notso.smollm3.engine.engine import Engine
    from notso.smollm3.values.messages import Message
    from notso.smollm3.values.sampling_params import SamplingParams


@dataclass(slots=True)
class Conversation:
    """Conversation of `notso chat`. Without `params.seed`, seeds are random."""

    engine: Engine
    params: SamplingParams
    system: str | None = None
    thinking: bool = True
    show_thinking: bool = True
    adapter: str | None = None
    messages: list[Message] = field(default_factory=list)
    context_used_tokens: int = 0

    def ask(self, question: str) -> PrintedMessage:
        """Answer a question, printing as it is generated, and store both.

        After Ctrl-C the partial answer is kept; a second one raises KeyboardInterrupt.
        """
        from notso.smollm3.values.messages import Message
        from notso.smollm3.values.request_options import RequestOptions

        asked = [*self.messages, Message("user", question)]
        instructions = [Message("system", self.system)] if self.system else []
        params = self.params
        if params.seed is None:
            params = dataclasses.replace(params, seed=secrets.randbits(63))
        printer = self._printer()
        with Interruption() as interruption:
            events = self.engine.generate(
                [*instructions, *asked],
                params,
                RequestOptions(thinking=self.thinking, adapter=self.adapter),
                cancelled=interruption.requested,
            )
            try:
                with terminal.waiting("processing the prompt") as answer_begins:
                    answer = collect(events, printer, answer_begins)
            finally:
                printer.finish()
        reply = Message("assistant", answer.text, reasoning_content=answer.reasoning or None)
        # Only now: an error of the engine leaves the conversation unchanged.
        self.messages = [*asked, reply]
        if answer.usage is not None:
            self.context_used_tokens = answer.usage.prompt_tokens + answer.usage.completion_tokens
        return answer

    def _printer(self) -> MessagePrinter:
        if not terminal.is_terminal(sys.stdout):
            return MessagePrinter(show_reasoning=self.show_thinking)
        from notso.cli.markdown_printer import MarkdownPrinter

        return MarkdownPrinter(show_reasoning=self.show_thinking)

    def clear(self) -> None:
        self.messages = []
        self.context_used_tokens = 0

    def take_back_turn(self) -> str | None:
        """Remove the last turn and return its question."""
        while self.messages:
            message = self.messages[-1]
            self.messages = self.messages[:-1]
            if message.role == "user":
                return message.content
        return None

    def status_line(self) -> str:
        info = self.engine.info
        thinking = "thinking" if self.thinking else "not thinking"
        return (
            f"{info.name} | {thinking} | temperature {self.params.temperature:g} | "
            f"{self.context_used_tokens:,} / {info.context_tokens:,} tokens"
        )
