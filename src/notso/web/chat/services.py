"""Services shared by the chat routes of one application."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from fastapi import Request

from notso.web.chat.html_cache import HtmlCache
from notso.web.chat.library import LibraryWorker
from notso.web.chat.suggestions import Suggestions
from notso.web.chat.templates import Pages
from notso.web.edge.assets import Assets
from notso.web.edge.connections import ClientConnection
from notso.web.edge.limits import StreamLimiter
from notso.web.edge.work_queue import WorkQueue
from notso.web.engine.downloads import Downloads
from notso.web.engine.host import EngineHost
from notso.web.engine.models import ModelRegistry
from notso.web.replicas.turn_relay import TurnRelay
from notso.web.services import SharedServices
from notso.web.store.protocol import ChatStore
from notso.web.tools.toolbox import Toolbox
from notso.web.turns.sse import Feed
from notso.web.turns.turns import Turns
from notso.web.values.fair_queue import FairQueue

if TYPE_CHECKING:
    from notso.web.tools.mcp_servers import McpServers

MAX_TURN_STREAMS = 8
MAX_PAGE_STREAMS = 16
PREVIEWS_AT_ONCE, MOST_WAITING_PREVIEWS = 2, 4
MOST_WAITING_IMPORTS = 8  # fewer if files are large: BodyBudget (edge/limits.py) admits 96 MiB, or six files of 16 MiB


@dataclass(slots=True)
class ChatServices:
    shared: SharedServices
    turns: Turns
    suggestions: Suggestions
    renderer: FairQueue
    assets: Assets
    pages: Pages
    html_cache: HtmlCache
    relay: TurnRelay
    library: LibraryWorker
    feed: Feed = field(default_factory=Feed)
    turn_streams: StreamLimiter = field(default_factory=lambda: StreamLimiter(MAX_TURN_STREAMS))
    page_streams: StreamLimiter = field(default_factory=lambda: StreamLimiter(MAX_PAGE_STREAMS))
    downloads: Downloads = field(default_factory=Downloads)
    toolbox: Toolbox = field(default_factory=Toolbox)
    mcp: McpServers | None = None
    backing_up: asyncio.Lock = field(default_factory=asyncio.Lock)
    backup_reader: ClientConnection | None = None
    backup_waits: bool = False  # whether a request is waiting for an aborted backup download to end
    exporting: FairQueue = field(default_factory=lambda: FairQueue("notso-export"))
    previews: WorkQueue = field(
        default_factory=lambda: WorkQueue("notso-preview", MOST_WAITING_PREVIEWS, PREVIEWS_AT_ONCE)
    )
    # An import occupies its slot until its chats are stored. Each user has at most one of the two slots.
    importing: WorkQueue = field(default_factory=lambda: WorkQueue("notso-import", MOST_WAITING_IMPORTS, at_once=2))


@dataclass(frozen=True, slots=True)
class ChatUser:
    """A user. `owner`: id of the user in the store."""

    services: ChatServices
    owner: str

    @property
    def store(self) -> ChatStore:
        return self.services.shared.store


def engine_and_registry(services: ChatServices) -> tuple[EngineHost, ModelRegistry | None]:
    return services.shared.engine, services.shared.model_registry


def chat_services(request: Request) -> ChatServices:
    return cast(ChatServices, request.app.state.chat)
