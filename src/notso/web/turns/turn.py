"""Define the state of a turn: the generation of one answer in a chat."""

from __future__ import annotations

from dataclasses import dataclass, field

from notso.smollm3 import Usage
from notso.web.engine.port import Request
from notso.web.store.protocol import AnswerTrace, StoredMessage
from notso.web.turns.every_part import DocumentPart
from notso.web.turns.tool_calls import ToolOffer
from notso.web.turns.turn_log import TurnLog


@dataclass(eq=False)
class Turn:
    message: StoredMessage  # at first the stored answer, which may be partial; in the end, the answer to store
    request: Request  # for the whole answer, even if part of it already exists
    trace: AnswerTrace
    offer: ToolOffer | None = None
    keep_thinking: bool = False  # whether prompts after a tool call contain the reasoning
    parts: tuple[DocumentPart, ...] = ()  # requests that replace `request`
    hurry: bool = False  # whether to end unfinished reasoning at once
    omitted_messages: int = 0  # number of messages omitted from `request`
    last_usage: Usage | None = None
    log: TurnLog = field(default_factory=TurnLog)
    cancelled: bool = False  # whether generation must stop, for any reason
    interrupted: bool = False  # whether generation must stop because of a shutdown or a lost lease
    is_taken_over: bool = False  # whether another process began the turn
    is_handed_over: bool = False  # whether another process will continue the turn
    is_unsaved: bool = False  # whether the turn has ended, but `message` could not be saved

    @property
    def id(self) -> str:
        """Unguessable generation id."""
        return self.message.generation_id or ""
