"""What the settings choose: who keeps the conversations, and who keeps keys and what is counted."""

from __future__ import annotations

from notso.plugins.plugin_set import Plugins
from notso.web.sign_in.ways import plugin_with_role
from notso.web.store.access import AccessStore
from notso.web.store.opening import access_store_at, store_at
from notso.web.store.plugin_store import plugin_store
from notso.web.store.protocol import ChatStore
from notso.web.store.sqlite.access import SQLiteAccessStore
from notso.web.values.settings import Settings


def store_of(settings: Settings, plugins: Plugins) -> ChatStore:
    """Raises SettingsError: what is to keep the conversations was not switched on, or is not installed."""
    if settings.store_plugin is None:
        return store_at(settings.directory, settings.database_url)
    return plugin_store(plugin_with_role(plugins, settings.store_plugin, "store_plugin"), settings.directory)


def access_store_of(settings: Settings, store: ChatStore) -> AccessStore | None:
    """None where one person uses the server, as it comes: nothing is counted and written down then. Where several
    servers share a database, a key may be added at any of them at any time."""
    is_shared = settings.database_url is not None
    is_wanted = is_shared or settings.many_use_it or SQLiteAccessStore.exists(settings.directory)
    return access_store_at(settings.directory, settings.database_url, store) if is_wanted else None
