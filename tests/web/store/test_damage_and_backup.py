"""A damaged database is read as far as possible and never written; a backup is complete and can replace it."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import ScriptedEngine, say

from notso.cli.app import run_command_line
from notso.web.store.sqlite.connection import detect_damage
from notso.web.store.sqlite.store import SQLiteStore
from notso.web.values.errors import StorageDamagedError, StorageFullError
from notso.web.values.ids import new_id

Start = Callable[..., Any]
FRAGMENT = {"HX-Request": "true", "HX-Request-Type": "partial"}


def filled(start: Start, chats: int = 3) -> list[Any]:
    """Create a database with a few chats and stop its server."""
    server = start(ScriptedEngine(lambda m, t: say("A plain answer. " * 200))).ready()
    asked = [server.ask(f"Question {number}") for number in range(chats)]
    for each in asked:
        server.finished(each)
    server.close()
    return asked


def ruin(path: Path) -> None:
    """Imitate a crash on a bad disk: mark the database as open and overwrite one index page with random bytes."""
    db = sqlite3.connect(path)
    db.execute("INSERT OR REPLACE INTO facts VALUES ('open', '1')")
    db.commit()
    page = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'messages_below'").fetchone()[0]
    size = db.execute("PRAGMA page_size").fetchone()[0]
    db.close()
    with path.open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(os.urandom(size))


def test_damaged_database_is_served_read_only_and_unchanged(start: Start, tmp_path: Path) -> None:
    asked = filled(start)
    path = tmp_path / "data" / "notso.db"
    assert detect_damage(path) == ""
    ruin(path)
    before = path.read_bytes()
    assert detect_damage(path) == "unsound"
    server = start(ScriptedEngine()).ready()
    page = server.client.get("/").text
    assert "opened read-only" in page and "Question 2" in page
    chat = server.client.get(f"/chats/{asked[0].chat_id}")
    assert "A plain answer." in chat.text and "opened read-only" in chat.text
    assert "A plain answer." in server.client.get(f"/chats/{asked[1].chat_id}/export/md").text
    assert len(server.client.get("/export").json()["chats"]) == 3
    assert "Question 1" in server.client.get("/search?q=Question").text
    refused = server.client.post("/chats", data={"text": "My draft", "key": new_id()})
    assert refused.status_code == 503 and "My draft" in refused.text and "read-only" in refused.text
    for url, fields in (("/settings", {"temperature": "0.5"}), (f"/chats/{asked[0].chat_id}/delete", {})):
        refused = server.client.post(url, data=fields, headers=FRAGMENT)
        assert refused.status_code == 503 and "damaged" in refused.text
    assert server.client.get("/backup").status_code == 503
    refused = server.client.post("/v1/responses", json={"input": "x"})
    assert refused.status_code == 503 and "store: false" in refused.text
    assert server.client.post("/v1/responses", json={"input": "x", "store": False}).status_code == 200
    server.close()
    assert path.read_bytes() == before


def test_running_answer_in_damaged_database_is_shown_interrupted(start: Start, tmp_path: Path) -> None:
    asked = filled(start, 1)[0]
    path = tmp_path / "data" / "notso.db"
    db = sqlite3.connect(path)
    db.execute("UPDATE messages SET state = 'running' WHERE id = ?", (asked.message_id,))
    db.commit()
    db.close()
    ruin(path)
    server = start(ScriptedEngine()).ready()
    page = server.client.get(f"/chats/{asked.chat_id}").text
    assert 'hx-sse:connect="/generations' not in page and "Interrupted" in page


def test_unreadable_database_fails_to_open(tmp_path: Path) -> None:
    path = tmp_path / "notso.db"
    path.write_bytes(b"SQLite format 3\x00" + b"\xff" * 8192)
    with pytest.raises(StorageDamagedError):
        asyncio.run(SQLiteStore(tmp_path).open())


def test_backup_of_a_running_server_is_complete(start: Start, tmp_path: Path) -> None:
    server = start(ScriptedEngine()).ready()
    asked = server.ask("Keep this")
    server.finished(asked)
    copy = tmp_path / "copy.db"
    assert run_command_line(["backup", str(copy), "--from", server.address]) == 0
    assert copy.stat().st_mode & 0o077 == 0
    db = sqlite3.connect(copy)
    assert db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    assert db.execute("SELECT title FROM chats").fetchall() == [("Keep this",)]
    db.close()
    server.wait(lambda: not list((tmp_path / "data").glob("backup-*")))
    assert server.client.get("/backup", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
    server.on_loop(server.chat.backing_up.acquire)
    one_more = server.client.get("/backup")
    assert one_more.status_code == 429 and one_more.headers["retry-after"] and "already in progress" in one_more.text
    server.on_loop(server.chat.backing_up.release)
    assert server.client.get("/backup").content[:15] == b"SQLite format 3"
    server.wait(lambda: not server.chat.backing_up.locked())
    assert run_command_line(["backup", str(copy), "--from", server.address]) != 0, "existing files are not overwritten"


def test_backup_can_replace_the_database(start: Start, tmp_path: Path) -> None:
    asked = filled(start, 1)[0]
    data, copy = tmp_path / "data", tmp_path / "copy.db"
    assert run_command_line(["backup", str(copy), "--data-dir", str(data)]) == 0
    for name in ("notso.db", "notso.db-wal", "notso.db-shm"):
        (data / name).unlink(missing_ok=True)
    copy.rename(data / "notso.db")
    server = start(ScriptedEngine()).ready()
    assert "A plain answer." in server.client.get(f"/chats/{asked.chat_id}").text


def test_failed_backup_reports_the_reason(start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = start(ScriptedEngine()).ready()
    copy = tmp_path / "copy.db"
    for arguments, reason in (
        (["--data-dir", str(tmp_path / "data")], "a server is using this data directory"),
        (["--data-dir", str(tmp_path / "nowhere")], "contains no chats"),
        (["--from", "127.0.0.1:3000"], "must begin with http"),
        (["--from", server.address.rpartition(":")[0] + ":9"], "returned no backup: Connection refused"),
        (["--from", "http://[::1"], "http://[::1 returned no backup"),
        (["--from", f"{server.address}/é"], "é returned no backup"),
    ):
        assert run_command_line(["backup", str(copy), *arguments]) != 0
        told = capsys.readouterr()
        assert reason in told.err and told.out == ""
        assert not copy.exists()


def test_refused_backup_shows_the_sentence_of_the_server(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(store: SQLiteStore, target: Path) -> None:
        raise StorageFullError("the disk has no room for a copy")

    monkeypatch.setattr(SQLiteStore, "backup", refuse)
    server = start(ScriptedEngine()).ready()
    for verb in ("backup", "dataset"):
        assert run_command_line([verb, str(tmp_path / "out"), "--from", server.address]) == 1
        assert "returned no backup: the disk has no room for a copy" in capsys.readouterr().err
    assert server.client.get("/backup", headers={"Accept": "application/json"}).json()["error"]["code"] == "disk_full"
    page = server.client.get("/backup", headers={"Accept": "text/html, application/json"})
    assert page.status_code == 507 and page.headers["content-type"].startswith("text/html")


class TruncatedBackup(BaseHTTPRequestHandler):
    """Sends the first half of a response whose length it has announced."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "8192")
        self.end_headers()
        self.wfile.write(b"SQLite format 3\0".ljust(4096, b"x"))

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("status", "reason"), [(501, "pg_dump"), (401, "--api-key-file"), (403, "--api-key-file"), (502, "502")]
)
def test_refused_backup_names_the_next_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], status: int, reason: str
) -> None:
    class Refusal(TruncatedBackup):
        def do_GET(self) -> None:
            self.send_error(status)

    with HTTPServer(("127.0.0.1", 0), Refusal) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        code = run_command_line(["backup", str(tmp_path / "out"), "--from", f"http://127.0.0.1:{server.server_port}"])
        thread.join()
    assert code == 1 and reason in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("verb", ["backup", "dataset"])
def test_truncated_download_fails_and_leaves_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    out = tmp_path / "out"
    with HTTPServer(("127.0.0.1", 0), TruncatedBackup) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        code = run_command_line([verb, str(out), "--from", f"http://127.0.0.1:{server.server_port}"])
        thread.join()
    assert code == 1 and "before the backup was complete" in capsys.readouterr().err
    assert not out.exists()


def test_backup_may_have_a_name_that_is_not_utf8(tmp_path: Path) -> None:
    async def create() -> None:
        store = SQLiteStore(tmp_path / "data")
        await store.open()
        await store.close()

    asyncio.run(create())
    copy = tmp_path / "caf\udce9.db"
    assert run_command_line(["backup", str(copy), "--data-dir", str(tmp_path / "data")]) == 0
    assert copy.read_bytes()[:15] == b"SQLite format 3"
