"""Hosts that MCP servers may be reached at without encryption."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from notso.web.values.errors import SettingsError


class HttpHosts:
    """This machine, and the names, addresses and networks that an operator allows.

    Raises SettingsError for what is none of these.
    """

    def __init__(self, allowed: Iterable[str] = ()) -> None:
        self._names: set[str] = set()
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        for each in allowed:
            try:
                self._networks.append(ipaddress.ip_network(each.strip("[]"), strict=False))
            except ValueError:
                name = each.lower().rstrip(".")
                if not name or not name.isascii() or not all(sign.isalnum() or sign in "-._" for sign in name):
                    message = f"--mcp-allow-http needs a host such as tools.lan or 192.168.1.0/24, not {each!r}"
                    raise SettingsError(message, setting="mcp_allow_http") from None
                self._names.add(name)

    def __contains__(self, host: str) -> bool:
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            name = host.lower().rstrip(".")
            return name == "localhost" or name in self._names
        return address.is_loopback or any(address in each for each in self._networks)
