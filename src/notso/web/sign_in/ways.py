"""All the ways to sign in that an operator chose, made ready."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from notso.plugins.plugin_set import Plugins
from notso.plugins.process import PluginProcess
from notso.web.edge.access import KeyRing, SessionBook, SignIn
from notso.web.edge.rate_limit import Counters
from notso.web.sign_in.accounts import Accounts
from notso.web.sign_in.given_keys import GivenKeys
from notso.web.sign_in.plugin_sign_in import PluginSignIn
from notso.web.sign_in.proxy_sign_in import ProxyHeader
from notso.web.store.access import AccessStore
from notso.web.values.errors import SettingsError
from notso.web.values.settings import Settings

if TYPE_CHECKING:
    from notso.web.sign_in.oidc import OidcProvider


@dataclass(frozen=True, slots=True)
class SignInWays:
    """`ring` knows callers; `accounts` count what they use (None: one person uses the server, nothing is counted)."""

    ring: KeyRing
    accounts: Accounts | None
    oidc: OidcProvider | None


def sign_in_ways(
    settings: Settings,
    plugins: Plugins,
    store: AccessStore | None,
    counters: Counters,
    book: SessionBook | None = None,
) -> SignInWays:
    """`counters` count the requests of keys.

    Raises SettingsError: the extra is missing, or a plugin that has a role was not switched on.
    """
    chosen = settings.sign_in
    sign_ins: list[SignIn] = []
    if chosen.proxy is not None:
        sign_ins.append(ProxyHeader(chosen.proxy, chosen.operators))
    if settings.sign_in_plugin is not None:
        sign_ins.append(PluginSignIn(plugin_with_role(plugins, settings.sign_in_plugin, "sign_in_plugin")))
    accounts = Accounts(store, counters) if store is not None else None
    ring = KeyRing(
        settings.api_key,
        sign_ins=tuple(sign_ins),
        book=book,
        keys=GivenKeys(store) if store is not None else None,
        gate=accounts,
        asks_who=chosen.asks_who,
        rules=chosen.rules,
    )
    return SignInWays(ring, accounts, _oidc(settings))


def plugin_with_role(plugins: Plugins, name: str, setting: str) -> PluginProcess:
    """Raises SettingsError: it was not switched on."""
    process = plugins.find(name)
    if process is None:
        message = f"the plugin {name} has a role but is not switched on: add --plugin {name}"
        raise SettingsError(message, setting=setting)
    return process


def _oidc(settings: Settings) -> OidcProvider | None:
    chosen = settings.sign_in
    if chosen.oidc is None:
        return None
    try:
        from notso.web.sign_in.oidc import OidcProvider
    except ImportError as error:
        message = "an OpenID provider needs the extra of that name: pip install 'notso-smollm3-bot[oidc]'"
        raise SettingsError(message, setting="sign_in") from error
    return OidcProvider(chosen.oidc, chosen.operators)
