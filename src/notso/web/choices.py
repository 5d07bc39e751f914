"""What the settings choose: who keeps the conversations, and who says who is there."""

from __future__ import annotations

from notso.plugins.plugin_set import Plugins
from notso.plugins.process import PluginProcess
from notso.web.edge.access import SignIn
from notso.web.sign_in.plugin_sign_in import PluginSignIn
from notso.web.store.opening import store_at
from notso.web.store.plugin_store import plugin_store
from notso.web.store.protocol import ChatStore
from notso.web.values.errors import SettingsError
from notso.web.values.settings import Settings


def sign_ins_of(settings: Settings, plugins: Plugins) -> tuple[SignIn, ...]:
    """Raises SettingsError: the plugin that is to sign people in was not switched on."""
    if settings.sign_in_plugin is None:
        return ()
    return (PluginSignIn(_named_plugin(plugins, settings.sign_in_plugin, "sign_in_plugin")),)


def store_of(settings: Settings, plugins: Plugins) -> ChatStore:
    """Raises SettingsError: what is to keep the conversations was not switched on, or is not installed."""
    if settings.store_plugin is None:
        return store_at(settings.directory, settings.database_url)
    return plugin_store(_named_plugin(plugins, settings.store_plugin, "store_plugin"), settings.directory)


def _named_plugin(plugins: Plugins, name: str, setting: str) -> PluginProcess:
    process = plugins.find(name)
    if process is None:
        raise SettingsError(
            f"the plugin {name} has a role but is not switched on: add --plugin {name}", setting=setting
        )
    return process
