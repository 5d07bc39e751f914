"""The choice of the database: how it is configured, which messages the command line prints, and what it refuses."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import ScriptedEngine

from notso.cli import exit_codes
from notso.cli.app import run_command_line
from notso.web.store.opening import create_store, query_database_info
from notso.web.store.sqlite.store import SQLiteStore
from notso.web.values.errors import SettingsError, StorageError
from notso.web.values.settings import Settings

Start = Callable[..., Any]


def test_sqlite_is_the_default_and_only_postgresql_urls_are_valid(tmp_path: Path) -> None:
    assert isinstance(create_store(tmp_path, None), SQLiteStore)
    for address in ("mysql://x", "sqlite:///x", "", "host=x"):
        with pytest.raises(SettingsError, match="postgresql://"):
            Settings(database_url=address)
        with pytest.raises(SettingsError, match="postgresql://"):
            query_database_info(address)
    assert "secret" not in repr(Settings(database_url="postgresql://a:secret@x/y"))


def test_missing_postgres_extra_is_named_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("store", "connection"):
        monkeypatch.setitem(sys.modules, f"notso.web.store.postgres.{module}", None)
    for ask in (lambda: create_store(Path(), "postgresql://x"), lambda: query_database_info("postgresql://x")):
        with pytest.raises(SettingsError, match=r"\[postgres\]"):
            ask()


def test_keys_command_uses_the_configured_database(
    new_database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DATABASE_URL", new_database)
    assert run_command_line(["keys", "add", "ann", "--data-dir", str(tmp_path / "data")]) == exit_codes.DONE
    assert run_command_line(["keys", "--json", "--data-dir", str(tmp_path / "other")]) == exit_codes.DONE
    assert '"name": "ann"' in capsys.readouterr().out and not list(tmp_path.iterdir())
    monkeypatch.setenv("DATABASE_URL", "postgresql://somebody:secret@127.0.0.1:1/x")
    assert run_command_line(["keys"]) == exit_codes.FAILED
    told = capsys.readouterr().err
    assert "cannot be reached" in told and "secret" not in told


def doctor(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, str]]:
    run_command_line(["doctor", "--json", "--port", "0"])
    return {each["subject"]: each for each in json.loads(capsys.readouterr().out)}


def test_doctor_checks_the_database(
    new_database: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DATABASE_URL", raising=False)
    assert doctor(capsys)["postgresql"]["status"] == "ok"
    monkeypatch.setenv("DATABASE_URL", new_database)
    found = doctor(capsys)
    assert found["postgresql"]["status"] == "warn" and "fsync" in found["postgresql"]["message"], "tests disable fsync"
    assert "PostgreSQL" in found["data"]["message"]
    monkeypatch.setenv("DATABASE_URL", "postgresql://somebody:secret@127.0.0.1:1/x")
    found = doctor(capsys)
    assert found["postgresql"]["status"] == "fail" and "refused" in found["postgresql"]["message"]
    assert "secret" not in str(found)


def test_cli_hides_database_password_and_refers_to_pg_dump(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://somebody:secret@127.0.0.1:1/x")
    assert run_command_line(["serve", "--show-config"]) == exit_codes.DONE
    said = capsys.readouterr().out
    assert "postgresql://somebody:***@127.0.0.1:1/x" in said and "secret" not in said
    assert run_command_line(["backup", str(tmp_path / "copy.db")]) == exit_codes.FAILED
    assert "pg_dump" in capsys.readouterr().err and not (tmp_path / "copy.db").exists()


def test_settings_page_and_backup_route_name_postgresql(new_database: str, start: Start) -> None:
    server = start(ScriptedEngine(), database_url=new_database).ready()
    server.finished(server.ask("Hello"))
    refused = server.client.get("/backup")
    assert refused.status_code == 501 and "pg_dump" in refused.text
    settings = server.client.get("/settings").text
    assert "Chats are stored in PostgreSQL" in settings and new_database not in settings
    with pytest.raises(StorageError, match="pg_dump"):
        server.on_loop(lambda: server.shared.store.backup(Path()))
    server.close()
