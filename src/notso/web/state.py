"""What the routes share, made once per application."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from fastapi import Request

from notso.web.api.shared.resumable import KeptAnswers
from notso.web.api.shared.running import OpenAnswers
from notso.web.chat.kept_html import KeptHtml
from notso.web.chat.suggestions import Suggestions
from notso.web.chat.templates import Pages
from notso.web.edge.assets import Assets
from notso.web.edge.client_connection import ClientConnection
from notso.web.edge.open_streams import OpenStreams
from notso.web.edge.work_line import WorkLine
from notso.web.engine.downloads import Downloads
from notso.web.engine.host import EngineHost
from notso.web.engine.metrics import Metrics
from notso.web.engine.models import Shelf
from notso.web.rendering.fair_queue import FairQueue
from notso.web.store.protocol import ChatStore
from notso.web.tools.toolbox import Toolbox
from notso.web.turns.tab_feed import Feed
from notso.web.turns.turns import Turns
from notso.web.values.settings import Settings

if TYPE_CHECKING:  # it comes with an extra
    from notso.web.tools.mcp_servers import McpServers

MAX_ANSWER_STREAMS = 8
MAX_PAGE_STREAMS = 16
MAX_REREAD_STREAMS = 64  # of programs' answers that are read again; who follows one from another machine may be many
MOST_WAITING_IMPORTS = 8  # of 16 MiB each; the budget of bodies holds four


@dataclass(slots=True)
class State:
    """`stopping` is set when the server was told to end: it answers, but admits nothing new. Without a `shelf` there is
    one model only. `large_work` is what large bodies and prompts wait in.
    """

    settings: Settings
    store: ChatStore
    engine: EngineHost
    turns: Turns
    suggestions: Suggestions
    renderer: FairQueue
    assets: Assets
    pages: Pages
    kept_html: KeptHtml
    feed: Feed = field(default_factory=Feed)
    answer_streams: OpenStreams = field(default_factory=lambda: OpenStreams(MAX_ANSWER_STREAMS))
    page_streams: OpenStreams = field(default_factory=lambda: OpenStreams(MAX_PAGE_STREAMS))
    reread_streams: OpenStreams = field(default_factory=lambda: OpenStreams(MAX_REREAD_STREAMS))
    answers: OpenAnswers = field(default_factory=OpenAnswers)
    kept_answers: KeptAnswers = field(default_factory=KeptAnswers)
    downloads: Downloads = field(default_factory=Downloads)
    metrics: Metrics = field(kw_only=True)
    shelf: Shelf | None = None
    toolbox: Toolbox = field(default_factory=Toolbox)
    mcp: McpServers | None = None
    backing_up: asyncio.Lock = field(default_factory=asyncio.Lock)
    backup_reader: ClientConnection | None = None
    exporting: asyncio.Lock = field(default_factory=asyncio.Lock)
    large_work: WorkLine = field(default_factory=lambda: WorkLine("notso-large"))
    importing: WorkLine = field(default_factory=lambda: WorkLine("notso-import", MOST_WAITING_IMPORTS))
    stopping: bool = False


def state_of(request: Request) -> State:
    """The application's state, for routes."""
    return cast(State, request.app.state.notso)
