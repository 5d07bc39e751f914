"""One question being answered: what is asked, and what it has come to."""

from __future__ import annotations

from dataclasses import dataclass, field

from notso.web.engine.port import Request
from notso.web.store.protocol import StoredMessage
from notso.web.turns.tool_calls import ToolOffer
from notso.web.turns.turn_log import TurnLog


@dataclass(eq=False)
class Turn:
    """A turn from its acceptance to its end.

    `message` is the stored message as it was last saved; text it has at the beginning is kept and written on.
    `request` asks for all of it, and `offer` is what may be called for it; with `keep_thinking` the
    model reads its thoughts again after a call.
    `left_out`: messages above what was read, for which no prompt has room.
    `cancelled`: somebody asked to stop it; `interrupted`: the server or the engine went away. `hurry`: a thought that
    was broken off ends at once, and the answer begins.
    """

    message: StoredMessage
    request: Request
    offer: ToolOffer | None = None
    keep_thinking: bool = False
    hurry: bool = False
    left_out: int = 0
    log: TurnLog = field(default_factory=TurnLog)
    cancelled: bool = False
    interrupted: bool = False

    @property
    def id(self) -> str:
        """The generation id, unguessable, by which readers attach."""
        return self.message.generation_id or ""
