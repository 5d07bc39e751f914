"""Set up all configured sign-in methods, including plugins and trusted proxy headers."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastapi import Request

from notso.plugins.errors import PluginError
from notso.plugins.process import PluginProcess, Plugins
from notso.web.edge.access import Caller, KeyRing, SharedStorage, SignIn, ipv4_network, is_in_networks, peer_of
from notso.web.edge.rate_limit import Counters
from notso.web.sign_in.accounts import Accounts
from notso.web.sign_in.issued_keys import IssuedKeys
from notso.web.store.access import AccessStore
from notso.web.values.child_work import call_plugin
from notso.web.values.errors import SettingsError, require_extra
from notso.web.values.settings import Settings
from notso.web.values.sign_in import ProxySignIn, is_listed, is_user_name

if TYPE_CHECKING:
    from notso.web.sign_in.oidc import OidcProvider


SIGN_IN_SECONDS = 5.0
OTHER_METHODS = frozenset({"key", "proxy", "oidc"})
"""Prefixes of owner ids, as in `proxy:NAME`. A sign-in plugin uses its name as the prefix, so its name must not be one
of these."""
_NAME = re.compile(r"[\w.@+-]{1,128}")


class PluginSignIn:
    """Sign-in by a plugin. If the plugin fails or is disabled, no users can sign in with it.

    Raises SettingsError if the plugin has the name of another method.
    """

    def __init__(self, process: PluginProcess) -> None:
        if process.name in OTHER_METHODS:
            message = f"a plugin named {process.name} cannot sign in users, because another method has that name"
            raise SettingsError(message, setting="sign_in_plugin")
        self._process = process

    async def __call__(self, request: Request) -> Caller | None:
        headers: dict[str, str] = {}
        for name, value in request.headers.items():  # join repeated headers, so that the plugin gets all their values
            headers[name.lower()] = f"{headers[name.lower()]}, {value}" if name.lower() in headers else value
        params = {"address": request.client.host if request.client else "", "headers": headers}
        try:
            name = await call_plugin(self._process, "sign_in", params, "signing in", SIGN_IN_SECONDS)
        except PluginError:
            return None
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            return None
        return Caller(f"{self._process.name}:{name}", name)


class ProxyHeader:
    def __init__(self, settings: ProxySignIn, operators: Collection[str]) -> None:
        self._header = settings.header
        self._networks = [ipaddress.ip_network(ipv4_network(address)) for address in settings.addresses]
        self._operators = operators

    async def __call__(self, request: Request) -> Caller | None:
        """Return the caller if a trusted proxy sent exactly one valid name, else None."""
        names = request.headers.getlist(self._header)
        if len(names) != 1 or not is_in_networks(peer_of(request), self._networks):
            return None
        try:
            name = names[0].encode("latin-1").decode("utf-8").strip(" \t")  # strip only the whitespace that HTTP allows
        except ValueError:
            return None
        return Caller(f"proxy:{name}", name, is_listed(name, self._operators)) if is_user_name(name) else None


@dataclass(frozen=True, slots=True)
class SignInMethods:
    ring: KeyRing
    accounts: Accounts | None  # None if the server has a single user
    oidc: OidcProvider | None


def sign_in_methods(
    settings: Settings,
    plugins: Plugins,
    store: AccessStore | None,
    counters: Counters,
    storage: SharedStorage | None = None,
) -> SignInMethods:
    """Set up the configured sign-in methods. `counters` count the requests of each key.

    Raises SettingsError for invalid settings, a missing extra, or a plugin that is not enabled.
    """
    chosen = settings.sign_in
    sign_ins: list[SignIn] = []
    if chosen.proxy is not None:
        sign_ins.append(ProxyHeader(chosen.proxy, chosen.operators))
    if (name := settings.sign_in_plugin) is not None:
        process = plugins.find(name)
        if process is None:
            message = f"the plugin {name} is used for sign-in but not enabled: add --plugin {name}"
            raise SettingsError(message, setting="sign_in_plugin")
        sign_ins.append(PluginSignIn(process))
    accounts = Accounts(store, counters) if store is not None else None
    ring = KeyRing(
        settings.api_key,
        sign_ins=tuple(sign_ins),
        storage=storage,
        keys=IssuedKeys(store) if store is not None else None,
        quota_check=accounts,
        requires_authentication=chosen.requires_authentication,
        rules=chosen.rules,
    )
    return SignInMethods(ring, accounts, _oidc(settings))


def _oidc(settings: Settings) -> OidcProvider | None:
    chosen = settings.sign_in
    if chosen.oidc is None:
        return None
    with require_extra("oidc", "sign_in"):
        from notso.web.sign_in.oidc import OidcProvider
    return OidcProvider(chosen.oidc, chosen.operators)
