"""State of a terminal conversation: messages, settings and context usage."""

from __future__ import annotations

import dataclasses
import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from notso.cli import engines, terminal
from notso.cli.message_printer import MessagePrinter, PrintedMessage, collect
from notso.cli.terminal import Interruption

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
    open_engine: Callable[[Path | None, bool], Engine] = field(
        default=lambda path, is_first: engines.open_engine(path, None, None)
    )
    is_first: bool = True  # the model that the command was started with, and the adapters and template for it
    messages: list[Message] = field(default_factory=list)
    saved_as: Path | None = None
    context_used_tokens: int = 0

    def ask(self, question: str) -> PrintedMessage:
        """Answer a question, printing as it is generated, and store both.

        After Ctrl-C the partial answer is kept; a second one raises KeyboardInterrupt.
        """
        from notso.smollm3.values.messages import Message

        asked = [*self.messages, Message("user", question)]
        answer = self._generate(asked)
        # Only now: an error of the engine leaves the conversation unchanged.
        self.messages = [*asked, Message("assistant", answer.text, reasoning_content=answer.reasoning or None)]
        return answer

    def go_on(self) -> PrintedMessage | None:
        """Continue the last answer as `ask` does; None: there is none."""
        if not self.messages or self.messages[-1].role != "assistant":
            return None
        last = self.messages[-1]
        answer = self._generate(self.messages, continue_last=True)
        reasoning = (last.reasoning_content or "") + answer.reasoning
        longer = dataclasses.replace(last, content=last.content + answer.text, reasoning_content=reasoning or None)
        self.messages = [*self.messages[:-1], longer]
        return answer

    def _generate(self, messages: Sequence[Message], *, continue_last: bool = False) -> PrintedMessage:
        from notso.smollm3.values.messages import Message
        from notso.smollm3.values.request_options import RequestOptions

        instructions = [Message("system", self.system)] if self.system else []
        params = self.params
        if params.seed is None:
            params = dataclasses.replace(params, seed=secrets.randbits(63))
        printer = self._printer()
        with Interruption() as interruption, terminal.quiet_keys():
            events = self.engine.generate(
                [*instructions, *messages],
                params,
                RequestOptions(thinking=self.thinking, adapter=self.adapter, continue_last=continue_last),
                cancelled=interruption.requested,
            )
            try:
                with terminal.waiting("processing the prompt") as answer_begins:
                    answer = collect(events, printer, answer_begins)
            finally:
                printer.finish()
        if answer.usage is not None:
            self.context_used_tokens = answer.usage.prompt_tokens + answer.usage.completion_tokens
        return answer

    def switch_model(self, path: Path | None) -> str | None:
        """Load another model (None: the demo), and return the adapter that is not used with it.

        Raises NotsoError or OSError; the old model, with its adapter, then stays in use.
        """
        engines.check_model(path)
        before, unused = self.engine, self.adapter
        # Closed first: two models may not fit in memory.
        before.close()
        try:
            self.engine = self.open_engine(path, False)
        except BaseException:
            self.engine = self.open_engine(None if before.info.is_demo else Path(before.info.path), self.is_first)
            raise
        self.is_first, self.adapter = False, None  # adapters belong to the model that they were given for
        self.context_used_tokens = 0
        return unused

    def _printer(self) -> MessagePrinter:
        if not terminal.is_terminal(sys.stdout):
            return MessagePrinter(show_reasoning=self.show_thinking)
        from notso.cli.markdown_printer import MarkdownPrinter

        return MarkdownPrinter(show_reasoning=self.show_thinking)

    def clear(self) -> None:
        self.messages = []
        self.saved_as = None
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
