"""What pages and APIs have in common: where things are kept, what answers, and how long this server goes on."""

from __future__ import annotations

from dataclasses import dataclass, field

from notso.plugins.plugin_set import Plugins
from notso.web.edge.work_line import WorkLine
from notso.web.engine.host import EngineHost
from notso.web.engine.models import ModelRegistry
from notso.web.engine.running import RunningRequests
from notso.web.replicas.exchange import Alone, Exchange
from notso.web.sign_in.accounts import Accounts
from notso.web.store.leases import Leases
from notso.web.store.protocol import ChatStore
from notso.web.values.settings import Settings


@dataclass(slots=True)
class Shared:
    """Made once per application. `requests` is the way into the engine. `stopping` is set when the server was told to
    end: it answers, but admits nothing new; before that it may be `leaving`. `plugins` are those that were switched on.
    Without a `model_registry` there is one model only. `accounts` count what is used, where many use the server.
    `exchange` is how it speaks with other servers over the same store. `large_work` is what large bodies and prompts
    wait in, `forms` the same for what is typed into pages: it does not wait for the work of programs. `leases` tell
    whether the database of conversations answers, where it is shared.
    """

    settings: Settings
    store: ChatStore
    engine: EngineHost
    requests: RunningRequests
    plugins: Plugins = field(default_factory=Plugins)
    model_registry: ModelRegistry | None = None
    accounts: Accounts | None = None
    large_work: WorkLine = field(default_factory=lambda: WorkLine("notso-large"))
    leases: Leases | None = None
    forms: WorkLine = field(default_factory=lambda: WorkLine("notso-form"))
    exchange: Exchange = field(default_factory=Alone)
    leaving: bool = False
    stopping: bool = False
