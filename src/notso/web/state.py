"""What the routes share, made once per application."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass
from typing import cast

from fastapi import Request

from notso.web.assets import Assets
from notso.web.chat.engine_thread import EngineThread
from notso.web.chat.turns import Turns
from notso.web.pages import Pages
from notso.web.settings import Settings
from notso.web.store.protocol import ChatStore


@dataclass(slots=True)
class State:
    """`stopping` is set when the server was told to end: it answers, but admits nothing new."""

    settings: Settings
    store: ChatStore
    engine: EngineThread
    turns: Turns
    renderer: Executor
    assets: Assets
    pages: Pages
    stopping: bool = False


def state_of(request: Request) -> State:
    """The application's state, for routes."""
    return cast(State, request.app.state.notso)
