"""What settings and environment choose: where keys and usage are stored, and whether there are traces."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from notso.web.edge.access import LOCAL_OWNER
from notso.web.store.access import AccessStore
from notso.web.store.opening import access_store_at, store_at
from notso.web.store.protocol import ChatStore
from notso.web.store.sqlite.access import SQLiteAccessStore
from notso.web.values.settings import Settings

if TYPE_CHECKING:
    from notso.web.tracing import Tracing

_log = logging.getLogger("notso.web")
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def store_of(settings: Settings) -> ChatStore:
    """The store of the conversations. Raises SettingsError: the extra for its database is missing."""
    store = store_at(settings.directory, settings.database_url)
    store.most_kept = lambda owner: 0 if owner == LOCAL_OWNER else settings.sign_in.kept_characters
    return store


def access_store_of(settings: Settings, store: ChatStore) -> AccessStore | None:
    """None where one person uses the server, as it comes: nothing is counted and written down then. Where several
    servers share a database, a key may be added at any of them at any time."""
    is_shared = settings.database_url is not None
    is_wanted = is_shared or settings.many_use_it or SQLiteAccessStore.exists(settings.directory)
    return access_store_at(settings.directory, settings.database_url, store) if is_wanted else None


def tracing_of(environment: Mapping[str, str] = os.environ) -> Tracing | None:
    """None where the standard variables name no place for traces, or switch them off: nothing is imported then. Where
    the extra is missing, that is told, and there are none: such variables are often set for many programs at once."""
    is_off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or (
        environment.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none"
    )
    if is_off or not any(environment.get(name) for name in _ENDPOINTS):
        return None
    try:
        from notso.web.tracing import Tracing, mark_logs
    except ImportError:
        _log.warning("traces were asked for, but the extra otel is missing: pip install 'notso-smollm3-bot[otel]'")
        return None
    mark_logs()
    return Tracing()
