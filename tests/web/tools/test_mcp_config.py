"""MCP configurations of other programs: usable entries are accepted, and the others are reported with a reason."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import ScriptedEngine
from web.tools.mcp_cases import CASES, ENVIRONMENT, WHOLE, Case, spoken

from notso.web.tools.mcp_config import (
    MAX_NAME_CHARACTERS,
    McpConfig,
    McpServerConfig,
    read_commented_json,
    read_mcp_config,
)
from notso.web.values.errors import SettingsError

FILES = Path(__file__).parents[2] / "strangers" / "mcp"
FRAGMENT = {"HX-Request": "true"}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def _said(entry: McpServerConfig) -> str:
    return spoken(entry.command, entry.args, entry.env, entry.cwd, entry.url, entry.headers)


def _check(config: McpConfig, used: dict[str, str], left_out: dict[str, str]) -> None:
    assert {each.title: _said(each) for each in config.entries} == used
    prefixes = [each.name for each in config.entries]
    assert len(set(prefixes)) == len(prefixes)
    assert all(re.fullmatch(rf"[A-Za-z0-9_-]{{1,{MAX_NAME_CHARACTERS}}}", each) for each in prefixes)
    for name, reason in left_out.items():
        assert any(each.name == name and reason in each.reason for each in config.left_out), config.left_out
    assert all(name in {each.name for each in config.left_out} for name in left_out)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_usable_entries_are_read_and_others_reported(tmp_path: Path, case: Case) -> None:
    (tmp_path / case.file).write_bytes(case.data)
    config = read_mcp_config(tmp_path / case.file)
    _check(config, case.used, case.left_out)
    if not case.left_out:
        assert not config.left_out


@pytest.mark.parametrize("name", WHOLE)
def test_example_file_entries_are_read_or_reported(name: str) -> None:
    used, left_out = WHOLE[name]
    config = read_mcp_config(FILES / name)
    _check(config, {each: text.replace("{folder}", str(FILES)) for each, text in used.items()}, left_out)


def test_every_example_file_has_expected_result() -> None:
    assert {each.name for each in FILES.iterdir()} == set(WHOLE) and len(WHOLE) >= 25
    assert len({case.name for case in CASES}) == len(CASES) >= 100


@pytest.mark.parametrize("name", WHOLE)
def test_tools_page_lists_every_entry_of_example_file(
    start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # an empty folder, so that no program can run
    server = start(ScriptedEngine, mcp_config=FILES / name).ready()
    page = server.client.get("/tools", headers=FRAGMENT).text
    used, left_out = WHOLE[name]
    for each in (*used, *left_out):
        assert each in page, each


def test_plain_http_is_limited_to_allowed_hosts(tmp_path: Path) -> None:
    urls = [
        "http://Tools.lan:1/",
        "http://10.1.2.3/",
        "http://[fd00::5]/",
        "http://10.2.0.1/",
        "http://tools.lan.example/",
    ]
    (tmp_path / "mcp.json").write_text(
        json.dumps({"mcpServers": {f"s{at}": {"url": url} for at, url in enumerate(urls)}})
    )
    config = read_mcp_config(tmp_path / "mcp.json", ["tools.lan", "10.1.0.0/16", "fd00::5"])
    assert [each.name for each in config.entries] == ["s0", "s1", "s2"]
    assert ["--mcp-allow-http" in each.reason for each in config.left_out] == [True, True]
    for wrong in ("", "http://tools.lan", "a b", "*"):
        with pytest.raises(SettingsError, match="--mcp-allow-http needs a host"):
            read_mcp_config(tmp_path / "mcp.json", [wrong])


def test_env_file_variables_are_read(tmp_path: Path) -> None:
    (tmp_path / ".env").write_bytes(b"\xef\xbb\xbf# mine\r\nexport A=1\r\nB = 'two words'\r\n\r\nnonsense\r\n")
    servers = {
        "a": {"command": "x", "envFile": "${workspaceFolder}/.env", "env": {"A": "3"}},
        "b": {"command": "x", "envFile": "none"},
    }
    (tmp_path / "mcp.json").write_text(json.dumps({"servers": servers}))
    config = read_mcp_config(tmp_path / "mcp.json")
    assert config.entries[0].env == {"A": "3", "B": "two words"}
    assert config.left_out[0].name == "b" and "envFile none cannot be read" in config.left_out[0].reason


@pytest.mark.parametrize(
    ("data", "reason", "file"),
    [
        (b"{", "line 1, column 2", "mcp.json"),
        (b'{"mcpServers": {\n "a": {"command": "x"}\n "b": {}}}', "line 3, column 2", "mcp.json"),
        (b'{"mcpServers": {} /* never closed', "is not JSON", "mcp.json"),
        (b"[]", 'key "mcpServers"', "mcp.json"),
        (b'{"mcpServers": 3}', '"mcpServers" must be an object', "mcp.json"),
        (b'{"mcpserver": {"a": 1}}', "its keys are: mcpserver", "mcp.json"),
        (b'{"mcpServers": {"a": "\xe9"}}', r"is not UTF-8 text \(byte 22\) in line 1", "mcp.json"),
        (b'{"mcpServers":\n {"a": "\0"}}', "line 2 contains a NUL", "mcp.json"),
        (b"[" * 100_000, "too deep", "mcp.json"),
        (b"a = ", "is not TOML", "config.toml"),
        (b"mcpServers:\n  a: {}\n", "is YAML", "config.yaml"),
    ],
)  # fmt: skip
def test_invalid_config_file_is_rejected_with_reason(tmp_path: Path, data: bytes, reason: str, file: str) -> None:
    (tmp_path / file).write_bytes(data)
    with pytest.raises(SettingsError, match=reason) as caught:
        read_mcp_config(tmp_path / file)
    assert file in str(caught.value) and caught.value.setting == "mcp_config"


def test_secrets_are_not_in_repr(tmp_path: Path) -> None:
    entry = {"command": "x", "env": {"A": "hush", "B": ["hush"]}}
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": {"a": entry, "b": {**entry, "env": {"A": "hush"}}}}))
    assert "hush" not in repr(read_mcp_config(tmp_path / "mcp.json"))


@pytest.mark.parametrize("value", [{"a": ["//", "/*", '"', "\\", ",}", ", ]"]}, [1, [2, {"": None}]], '\\"//'])
def test_plain_json_is_parsed_unchanged(value: object) -> None:
    assert read_commented_json(json.dumps(value, indent=1)) == value
