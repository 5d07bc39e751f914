"""Settings of host names and trusted networks: values that match no request are refused when the server starts."""

from __future__ import annotations

import pytest

from notso.web.values.errors import SettingsError
from notso.web.values.settings import Settings


@pytest.mark.parametrize("name", ["bot.example", "Bot_1", "10.1.2.3", "[fd00::1]", "fd00::1", "xn--mnchen-3ya.example"])
def test_host_names_are_accepted_in_lower_case_without_brackets(name: str) -> None:
    assert name.lower().strip("[]") in Settings(allowed_hosts=(name,)).host_names


@pytest.mark.parametrize(
    "name",
    [
        *("bot.example:8443", "abc:8443", "https://bot.example", "bot.example/chat", "10.1.2.3:80", "[fd00::1]:80"),
        *("*.bot.example", "münchen.example", "fe80::1%eth0", "a b", ""),
    ],
)
def test_host_that_no_request_can_name_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match="allow_host must be a host name") as refusal:
        Settings(allowed_hosts=("good.example", name))
    assert repr(name) in str(refusal.value)


def test_network_with_host_bits_is_refused_with_both_meanings() -> None:
    for proxy, told in (
        ("10.0.0.5/8", "write 10.0.0.5 for the address or 10.0.0.0/8 for the network"),
        ("fd00::5/64", "write fd00::5 for the address or fd00::/64 for the network"),
        ("proxy/8", "'proxy/8' is neither an address nor a network"),
    ):
        with pytest.raises(SettingsError, match=told):
            Settings(trusted_proxies=(proxy,))
