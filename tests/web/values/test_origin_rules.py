"""Origin rules match exactly, never by prefix or suffix."""

from __future__ import annotations

import pytest

from notso.web.values.settings import OriginRules

MEANT = [
    ("app://obsidian.md", "app://obsidian.md"),
    ("app://obsidian.md/", "APP://obsidian.md"),
    ("vscode-webview://*", "vscode-webview://1a2b3c"),
    ("http://localhost:*", "http://localhost"),
    ("http://localhost:*", "http://localhost:5173"),
    ("http://[::1]:*", "http://[::1]:80"),
    ("http://*", "http://a.example:81"),
    ("*", "https://a.example"),
]
NOT_MEANT = [
    ("app://obsidian.md", "app://obsidian.md.evil"),
    ("app://obsidian.md", "http://obsidian.md"),
    ("app://obsidian.md", "app://obsidianxmd"),
    ("http://localhost:*", "http://localhost.evil:80"),
    ("http://localhost:*", "https://localhost"),
    ("http://localhost:5173", "http://localhost:51730"),
    ("http://localhost", "http://localhost:1"),
    ("http://localhost:*", "http://localhost:1@evil"),
    ("vscode-webview://*", "https://evil"),
    ("*", "null"),
    ("*", "*"),
    ("*", ""),
    ("*", "http://a b"),
]


@pytest.mark.parametrize(("rule", "origin"), MEANT)
def test_matching_origin_is_allowed(rule: str, origin: str) -> None:
    assert OriginRules([rule]).allow(origin)


@pytest.mark.parametrize(("rule", "origin"), NOT_MEANT)
def test_other_origin_is_not_allowed(rule: str, origin: str) -> None:
    assert not OriginRules([rule]).allow(origin)


def test_empty_rules_allow_no_origin() -> None:
    assert not OriginRules([]).allow("http://localhost")


@pytest.mark.parametrize("rule", ["", "null", "localhost", "http://", "http://a/b", "http://*.example", "://x", "**"])
def test_invalid_origin_rule_is_rejected(rule: str) -> None:
    with pytest.raises(ValueError, match="is not an origin"):
        OriginRules([rule])
