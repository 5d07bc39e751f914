"""`notso plugin`, and the option `--plugin` of `notso serve`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from plugins.installed_plugins import NAMES, install

from notso.cli import options

Notso = Callable[..., Any]


def test_installed_plugins_are_listed_and_reported_by_doctor(
    notso: Notso, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch)
    listed = json.loads(notso("plugin", "list", "--json").out)
    assert {"name": "kind", "distribution": "hostile-plugins", "version": "1.0"} in listed
    assert set(NAMES) <= {each["name"] for each in listed}
    assert "kind" in notso("plugin").out
    findings = json.loads(notso("doctor", "--json").out)
    said = [each["message"] for each in findings if each["subject"] in ("plugins", "plugin")]
    assert said[0] == "built in: calculator, clock, search_chats, read_attachment, fetch_page, remember"
    assert "kind of hostile-plugins 1.0: `serve --plugin kind`" in said


def test_plugin_new_creates_a_plugin_but_never_overwrites(notso: Notso, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    assert notso("plugin", "new", "mine", "--folder", str(folder)).code == 0
    assert (folder / "mine.py").is_file() and (folder / "test_plugin.py").is_file()
    again = notso("plugin", "new", "mine", "--folder", str(folder))
    assert again.code != 0 and len(again.err.splitlines()) == 1
    for arguments in (("plugin", "new"), ("plugin", "new", "A b"), ("plugin", "old")):
        refused = notso(*arguments)
        assert refused.code != 0 and len(refused.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("class", "keyword"),
        ("json", "would hide"),
        ("unittest", "would hide"),
        ("notso", "would hide"),
        ("numpy", "would hide"),
        ("test-plugin", "would hide"),
        ("3d", "must begin with a letter"),
        ("Word", "must begin with a letter"),
        ("a--b", "single dashes"),
        ("a-", "single dashes"),
        ("a_b", "lowercase letters"),
        ("", "lowercase letters"),
        ("a" * 33, "up to 32"),
    ],
)
def test_invalid_plugin_name_is_refused_without_writing_files(
    notso: Notso, tmp_path: Path, name: str, why: str
) -> None:
    refused = notso("plugin", "new", name, "--folder", str(tmp_path / "new"))

    assert refused.code == 2 and why in refused.err and "plugin list" not in refused.err
    assert not (tmp_path / "new").exists()


def test_name_of_an_installed_plugin_is_refused(notso: Notso, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch)

    refused = notso("plugin", "new", "kind", "--folder", str(tmp_path / "new"))

    assert refused.code == 2 and "'kind': a plugin of that name is already installed" in refused.err


def test_serve_refuses_a_plugin_that_is_not_installed(notso: Notso, tmp_path: Path) -> None:
    refused = notso("serve", "--plugin", "nobody", "--data-dir", str(tmp_path), "--port", "0", "--no-browser")
    assert refused.code != 0 and "no plugin 'nobody' is installed" in refused.err


def test_plugin_options_are_parsed_with_roles() -> None:
    assert options.plugins(None) == options.PluginChoice((), None)
    chosen = options.plugins(["kind", "doorman:sign-in", "doorman"])
    assert chosen == options.PluginChoice(("kind", "doorman"), "doorman")
    for wrong in (["a:b"], ["a:sign-in", "b:sign-in"], ["a:store"]):
        with pytest.raises(typer.BadParameter, match="only role is sign-in"):
            options.plugins(wrong)
