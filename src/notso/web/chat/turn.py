"""One question being answered."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from datetime import date

from notso.web.chat.engine_port import Message, SamplingParams
from notso.web.chat.turn_log import TurnLog
from notso.web.store.protocol import StoredMessage


@dataclass(eq=False)
class Turn:
    """A turn from its acceptance to its end.

    `answer` is the stored message as it was last saved. `stop_state` is what a cancelled turn becomes: 'stopped' when
    a person asked, 'interrupted' when the server went away.
    """

    answer: StoredMessage
    messages: tuple[Message, ...]
    thinking: bool
    prompt_date: date
    params: SamplingParams = field(default_factory=SamplingParams)
    log: TurnLog = field(default_factory=TurnLog)
    cancel: threading.Event = field(default_factory=threading.Event)
    interrupted: bool = False

    @property
    def id(self) -> str:
        """The generation id, unguessable, by which readers attach."""
        return self.answer.generation_id or ""
