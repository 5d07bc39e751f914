"""The configuration file: precedence of settings, how they are shown, and one-line errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]


@pytest.fixture
def config(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(own_home / "config"))
    path = own_home / "config/notso/config.toml"
    path.parent.mkdir(parents=True)
    return path


def sources(text: str) -> dict[str, tuple[str, str]]:
    rows = [line.split() for line in text.splitlines()[2:]]
    return {name: (value, " ".join(source)) for name, value, *source in rows}


def test_option_overrides_environment_file_and_default(
    notso: Run, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.write_text(
        '[serve]\nport = 8080\nhost = "127.0.0.2"\ncontext = 512\nmax-num-seqs = 3\nallow-host = ["a", "b"]\n'
    )
    monkeypatch.setenv("NOTSO_HOST", "127.0.0.3")
    result = notso("serve", "--show-config", "--context", "256")
    assert result.code == 0 and result.out.splitlines()[0] == f"configuration file: {config}"
    told = sources(result.out.replace("['a', 'b']", "a,b"))
    assert told["context"] == ("256", "command line") and told["host"] == ("127.0.0.3", "environment")
    assert told["port"] == ("8080", "file") and told["max-num-seqs"] == ("3", "file")
    assert told["allow-host"] == ("a,b", "file")
    assert told["kv"] == ("auto", "default") and told["model"] == ("-", "default") and "show-config" not in told


def test_each_command_reads_its_own_table(notso: Run, config: Path) -> None:
    config.write_text("[run]\nmax-tokens = 1\ntemperature = 0.0\nstats = true\n[serve]\nport = 1\n")
    result = notso("run", "--no-think", "Hello")
    assert result.code == 8 and "The answer was cut off" in result.err and "fingerprint" in result.err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[serve", "config.toml: "),
        ("[fly]\nhigh = 1\n", "[fly] is not a command; commands: serve, chat"),
        ("serve = 3\n", "[serve] is not a command"),
        ("[serve]\nports = 1\n", "[serve] has no option ports; options: "),
        ("[serve]\nmax_num_seqs = 1\n", "[serve] has no option max_num_seqs; options: "),
        ("[serve.port]\nx = 1\n", "[serve] port is a table"),
        ('[serve]\nport = "many"\n', "Invalid value for '--port'"),
        ("[serve]\nport = true\n", "[serve] port must be an integer"),
        ("[serve]\nport = 1.9\n", "[serve] port must be an integer"),
        ("[serve]\nport = [1]\n", "[serve] port must be an integer"),
        ("[serve]\ncache-disk = true\n", "[serve] cache-disk must be a number"),
        ("[serve]\ncache-disk = nan\n", "[serve] cache-disk must be a number"),
        ("[serve]\ncache-disk = inf\n", "[serve] cache-disk must be a number"),
        ("[serve]\nhost = true\n", "[serve] host must be a string"),
        ("[serve]\nhost = 2026-11-25\n", "[serve] host must be a string"),
        ("[serve]\nstrict-fields = 1\n", "[serve] strict-fields must be true or false"),
        ("[serve]\ndata-dir = false\n", "[serve] data-dir must be a string"),
        ('[serve]\nallow-host = "ab"\n', "[serve] allow-host must be a list"),
        ("[serve]\nallow-host = [true]\n", "[serve] allow-host must be a list"),
        (f"[serve]\ncache-disk = 1{'0' * 400}\n", "[serve] cache-disk must be a number"),
        (f"[serve]\nport = 1{'0' * 400}\n", "less than or equal to 65535"),
        ("[serve]\nport = 70000\n", "less than or equal to 65535"),
    ],
)
def test_invalid_configuration_file_is_a_one_line_error(notso: Run, config: Path, text: str, words: str) -> None:
    config.write_text(text)
    result = notso("serve", "--show-config")
    assert result.code == 2 and words in result.err and result.err.count("\n") == 1


def test_notso_config_selects_another_file(
    notso: Run, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.write_text("[serve]\nport = 1\n")
    monkeypatch.setenv("NOTSO_CONFIG", str(tmp_path / "other.toml"))
    result = notso("serve", "--show-config")
    assert result.code == 2 and "no such file" in result.err
    (tmp_path / "other.toml").write_text("[serve]\nport = 2\n")
    assert sources(notso("serve", "--show-config").out)["port"] == ("2", "file")


def test_paths_in_the_file_may_begin_with_a_tilde(notso: Run, config: Path, own_home: Path) -> None:
    config.write_text('[serve]\ndata-dir = "~/chats"\nhost = "~"\nmodel = "~no-user/m"\n')
    shown = sources(notso("serve", "--show-config").out)
    assert shown["data-dir"] == (str(own_home / "chats"), "file") and shown["host"] == ("~", "file")
    assert shown["model"] == ("~no-user/m", "file")  # a shell leaves the names of unknown users as they are, too


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://ann:secret@db/notso", "postgresql://ann:***@db/notso"),
        ("postgresql://ann@db/notso?password=secret&x=1", "postgresql://ann@db/notso?password=***&x=1"),
        ("postgresql:///notso?host=/run&sslpassword=secret", "postgresql:///notso?host=/run&sslpassword=***"),
    ],
)
def test_passwords_are_not_shown(notso: Run, config: Path, url: str, shown: str) -> None:
    assert sources(notso("serve", "--show-config", "--database-url", url).out)["database-url"][0] == shown
