"""Signing in by a proxy in front, which names the person in a header: from its own addresses, and from no others."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection

from fastapi import Request

from notso.web.edge.access import Caller, peer_of
from notso.web.values.sign_in import ProxySignIn
from notso.web.values.visible_text import is_visible

MAX_NAME_CHARACTERS = 128


class ProxyHeader:
    """Whose header counts, and what it says."""

    def __init__(self, settings: ProxySignIn, operators: Collection[str]) -> None:
        self._header = settings.header
        self._networks = [ipaddress.ip_network(address) for address in settings.addresses]
        self._operators = operators

    async def __call__(self, request: Request) -> Caller | None:
        """Who it is; None where the other end is no trusted proxy, or says nothing, several things, or a name with what
        is not seen in it: of two names that look alike one could be an operator's."""
        names = request.headers.getlist(self._header)
        if len(names) != 1 or not self._is_trusted(peer_of(request)):
            return None
        try:
            name = names[0].encode("latin-1").decode("utf-8").strip(" \t")  # as HTTP has it, and nothing else
        except ValueError:
            return None
        if not name or len(name) > MAX_NAME_CHARACTERS or not all(map(is_visible, name)):
            return None
        return Caller(f"proxy:{name}", name, name in self._operators)

    def _is_trusted(self, host: str) -> bool:
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        mapped = getattr(address, "ipv4_mapped", None)
        return any((mapped or address) in network for network in self._networks)
