"""State of a turn: the generation of one answer in a chat."""

from __future__ import annotations

from dataclasses import dataclass, field

from notso.web.engine.port import Request
from notso.web.store.protocol import AnswerTrace, StoredMessage
from notso.web.turns.every_part import Part
from notso.web.turns.tool_calls import ToolOffer
from notso.web.turns.turn_log import TurnLog


@dataclass(eq=False)
class Turn:
    message: StoredMessage  # as last saved; if it contains a part of the answer, that part is continued
    request: Request  # asks for the whole answer
    offer: ToolOffer | None = None
    keep_thinking: bool = False  # keep reasoning in the prompt after a tool call
    parts: tuple[Part, ...] = ()  # requests that replace `request`
    hurry: bool = False  # end interrupted reasoning at once
    left_out: int = 0  # messages that do not fit in any prompt
    model: str | None = None  # setting that chose the model
    trace: AnswerTrace | None = None  # as stored
    log: TurnLog = field(default_factory=TurnLog)
    cancelled: bool = False  # by a user
    interrupted: bool = False  # by shutdown of the server or engine
    is_taken_up: bool = False  # another process began it
    is_left: bool = False  # the next process will continue it

    @property
    def id(self) -> str:
        """Unguessable generation id."""
        return self.message.generation_id or ""
