"""The set of installed plugins, and what they provide together."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from plugins.installed_plugins import NAMES, install

from notso.plugins.errors import PluginError
from notso.plugins.loading import list_installed
from notso.plugins.offers import validate_offer
from notso.plugins.process import PluginProcess, Plugins


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    install(tmp_path, monkeypatch)
    yield


def test_installed_plugins_are_listed_without_importing_them() -> None:
    ours = [each for each in list_installed() if each.distribution == "hostile-plugins"]
    assert {each.name for each in ours} == set(NAMES) and {each.version for each in ours} == {"1.0"}
    assert "hostile_import" not in sys.modules and "hostile_plugin" not in sys.modules


@pytest.mark.parametrize(
    ("names", "why"),
    [(("nobody",), "no plugin 'nobody' is installed"), (("kind", "kind"), "more than once"), (("",), "is installed")],
)
def test_unknown_or_duplicate_plugin_names_are_refused(names: tuple[str, ...], why: str) -> None:
    with pytest.raises(PluginError, match=why):
        Plugins(names)


def test_plugin_names_and_command_names_follow_the_same_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("with_underscore", "with-dash", "Capital", "1st", "a.b")
    install(tmp_path / "named", monkeypatch, dict.fromkeys(names, "hostile_plugin:KIND"))
    assert set(names) <= {each.name for each in list_installed()}
    for name in names:
        _, left_out = validate_offer({"slash_commands": [{"name": name, "usage": "", "does": ""}]})
        if name in ("with_underscore", "with-dash"):
            assert not left_out and Plugins((name,)).find(name) is not None
            continue
        rule = left_out[0].partition("name ")[2]
        with pytest.raises(PluginError) as caught:
            Plugins((name,))
        assert str(caught.value) == f"the plugin {name!r} cannot be enabled: its name {rule}"


def offering(name: str, **offer: object) -> PluginProcess:
    process = PluginProcess(name)
    process.state, process.offer = "on", offer
    return process


def test_first_plugin_wins_a_duplicate_tool_name() -> None:
    plugins = Plugins()
    plugins.processes = (
        offering("first", tools=[{"name": "same"}]),
        offering("second", tools=[{"name": "same"}, {"name": "own"}]),
    )
    found = [(process.name, row["name"]) for process, row in plugins.entries("tools")]
    assert found == [("first", "same"), ("second", "own")]


def test_disabled_plugin_provides_nothing() -> None:
    plugins = Plugins(("kind", "unloadable"))
    plugins.start()
    plugins.wait()
    assert [row["name"] for _, row in plugins.entries("tools")] == ["echo", "refuse"]
    assert plugins.logits_processor("ban_1000") is not None and plugins.logits_processor("echo") is None
    plugins.close()
    assert list(plugins.entries("tools")) == [] and plugins.logits_processor("ban_1000") is None
    assert [process.state for process in plugins.processes] == ["off", "off"]


def test_plugin_package_imports_no_heavy_modules() -> None:
    code = (
        "import sys, notso.plugins; sys.exit(bool({'numpy', 'pydantic', 'fastapi', 'tokenizers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
