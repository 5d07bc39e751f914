"""Error messages contain the command that installs an extra for this installation."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from notso import extras

CASES = [
    ('{"dir_info": {"editable": true}, "url": "file:///a%20b"}', f"{sys.executable} -m pip install -e '/a b[ray]'"),
    ('{"archive_info": {}, "url": "file:///d/n.whl"}', f"{sys.executable} -m pip install '/d/n.whl[ray]'"),
    ('{"url": "https://example.org/n.whl"}', "pip install 'WHEEL[ray]' (see docs/installing.md)"),
    (None, "pip install 'WHEEL[ray]' (see docs/installing.md)"),
]


@pytest.mark.parametrize(("source", "line"), CASES)
def test_install_command_matches_the_installation(source: str | None, line: str, monkeypatch: Any) -> None:
    class Found:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return source

    monkeypatch.setattr(extras, "distribution", lambda name: Found())
    assert extras.install_line("ray") == line


def test_install_command_without_package_metadata(monkeypatch: Any) -> None:
    def missing(name: str) -> Any:
        raise extras.PackageNotFoundError(name)

    monkeypatch.setattr(extras, "distribution", missing)
    assert extras.install_line("ray").startswith("pip install 'WHEEL[ray]'")
