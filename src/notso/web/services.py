"""Services shared by the pages and the APIs."""

from __future__ import annotations

from dataclasses import dataclass, field

from notso.plugins.process import Plugins
from notso.web.edge.work_queue import WorkQueue
from notso.web.engine.host import EngineHost
from notso.web.engine.models import ModelRegistry
from notso.web.engine.running import RunningRequests
from notso.web.replicas.exchange import Exchange, LocalExchange
from notso.web.sign_in.accounts import Accounts
from notso.web.store.leases import LeaseKeeper
from notso.web.store.protocol import ChatStore
from notso.web.values.settings import Settings


@dataclass(slots=True)
class SharedServices:
    settings: Settings
    store: ChatStore
    engine: EngineHost
    requests: RunningRequests  # all requests to the engine go through it
    plugins: Plugins = field(default_factory=Plugins)
    model_registry: ModelRegistry | None = None  # None if the server has a single model
    accounts: Accounts | None = None  # usage accounting; None without an access store
    large_work: WorkQueue = field(default_factory=lambda: WorkQueue("notso-large"))  # for large bodies and prompts
    leases: LeaseKeeper | None = None  # sends heartbeats to the database; `leases.failing` is true while they fail
    # Queue for page forms, separate from `large_work` so that API requests do not delay pages.
    forms: WorkQueue = field(default_factory=lambda: WorkQueue("notso-form"))
    # Queue for parsing documents in requests. Few run at once, because each may take a minute and 1 GiB of memory,
    # and occupies a thread of asyncio's default executor.
    documents: WorkQueue = field(default_factory=lambda: WorkQueue("notso-documents", at_once=2))
    exchange: Exchange = field(default_factory=LocalExchange)  # messages between servers that share the database
    leaving: bool = False  # while true, /health fails, so that proxies send no more requests
    stopping: bool = False  # while true, no new requests are admitted
