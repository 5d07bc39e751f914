"""Signing in by a plugin: it is shown a request's headers and the other end's address, and names who that is."""

from __future__ import annotations

import re

from fastapi import Request

from notso.plugins.errors import PluginError
from notso.plugins.process import PluginProcess
from notso.web.edge.access import Caller
from notso.web.values.errors import SettingsError
from notso.web.values.plugin_call import call_plugin

SIGN_IN_SECONDS = 5.0
OTHER_WAYS = frozenset({"key", "proxy", "oidc"})
"""What owners begin with that keys, a proxy and a provider tell of; a plugin's begin with its name."""
_NAME = re.compile(r"[\w.@+-]{1,128}")


class PluginSignIn:
    """Where the plugin is off, it knows nobody: the server's own key is what is left. Raises SettingsError for one
    whose people would be others'."""

    def __init__(self, process: PluginProcess) -> None:
        if process.name in OTHER_WAYS:
            message = (
                f"a plugin called {process.name} cannot sign people in: they would be taken for those of {process.name}"
            )
            raise SettingsError(message, setting="sign_in_plugin")
        self._process = process

    async def __call__(self, request: Request) -> Caller | None:
        headers: dict[str, str] = {}
        for name, value in request.headers.items():  # one that comes twice is shown whole: none can hide another
            headers[name.lower()] = f"{headers[name.lower()]}, {value}" if name.lower() in headers else value
        given = {"address": request.client.host if request.client else "", "headers": headers}
        try:
            name = await call_plugin(self._process, "sign_in", given, "signing in", SIGN_IN_SECONDS)
        except PluginError:
            return None
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            return None
        return Caller(f"{self._process.name}:{name}", name)
