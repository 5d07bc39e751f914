"""EIO and ENOSPC at every call that changes the database: no acknowledged data is lost, and no restart is needed."""

from __future__ import annotations

import errno
import json
import re
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from chaos.disk_shim import EVER, Shim
from chaos.killed_store import kill_after, run_program
from chaos.ledger import LONG, Ledger
from chaos.victim import ANSWERED, Victim

from notso.web.values.ids import new_id

ERRORS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC}
EACH = 1 if LONG else 15  # test every call at full length, every 15th in the short form
MEANT = {200, 303, 503, 507}

IN_PROCESS = """
import asyncio
import json
import os
import shutil
import sqlite3
import sys
from pathlib import Path
from chaos.disk_shim import EVER, Shim
from chaos.stored_turns import a_chat, save_turn, shown, with_store
from notso.web.values.errors import StorageError
from notso.web.store.sqlite.store import SQLiteStore

folder, error, each = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
killed, data = folder / "killed", folder / "data"
shim = Shim.inherited()
wrong, faults = [], 0

def fresh():
    shutil.rmtree(data, ignore_errors=True)
    shutil.copytree(killed, data)

def whole(what, questions, answers):
    "Check that all acknowledged turns are stored, the file is intact, and the store is writable."
    async def look(store):
        return store.read_only, await shown(store)
    try:
        found = with_store(data, look)
    except StorageError as error:
        found = repr(error)
    if found != (False, (questions, answers)):
        wrong.append((what, found))
    with sqlite3.connect(data / "notso.db") as db:
        if db.execute("PRAGMA integrity_check").fetchall() != [("ok",)]:
            wrong.append((what, "damaged file"))

async def nothing(store):
    pass

async def one_more(store):
    chats = await store.chats("local")
    await save_turn(store, chats[0], 3)

def calls_of(work):
    fresh()
    before = shim.read("calls")
    with_store(data, work)
    return shim.read("calls") - before

three = [0, 1, 2]
for name, work in (("start and end", nothing), ("start, a turn and end", one_more)):
    most = calls_of(work)
    for number in range(0, most + 2, each):
        for count in (1, EVER):
            fresh()
            faults += 1
            acknowledged = False
            shim.fail(number, error, count)
            try:
                with_store(data, work)
                acknowledged = work is one_more
            except StorageError:
                pass
            except Exception as unexpected:
                wrong.append((name, number, count, repr(unexpected)))
            shim.mend()
            async def look(store):
                return (await shown(store)) + (store.read_only,)
            try:
                questions, answers, read_only = with_store(data, look)
            except Exception as unexpected:
                wrong.append((name, number, count, "afterwards", repr(unexpected)))
                continue
            if read_only or questions[:3] != three or answers[:3] != three or (acknowledged and answers[3:] != [3]):
                wrong.append((name, number, count, read_only, questions, answers))
            whole((name, number, count), questions, answers)
print(json.dumps([faults, [repr(each) for each in wrong]]))
"""


def text_of(page: str) -> str:
    return re.sub(r"<[^>]*>", " ", page)


def settled(server: Victim, chat: str) -> str:
    """Wait until no answer of the chat is running; return its page."""
    deadline = time.monotonic() + 120
    while True:
        page = server.client.get(chat)
        if page.status_code == 200 and not re.search(r'data-state="(queued|running)"', page.text):
            return page.text
        assert time.monotonic() < deadline, f"{chat}: {page.status_code}"
        time.sleep(0.02)


def calls_of_a_turn(server: Victim, shim: Shim) -> int:
    before = shim.read("calls")
    server.wait_for(ANSWERED, server.ask("how many calls"))
    return shim.read("calls") - before


@pytest.mark.parametrize("error", ERRORS)
def test_disk_errors_during_turn_lose_no_acknowledged_data(
    tmp_path: Path, victim: Callable[..., Victim], ledger: Ledger, error: str
) -> None:
    shim = Shim(tmp_path, tmp_path / "data")
    server = victim(environment=shim.environment)
    most = max(calls_of_a_turn(server, shim) for _ in range(3)) + 8
    acknowledged: dict[str, str] = {}
    wrong: list[object] = []
    tried = 0
    for number in range(0, most, EACH):
        for count in (1, EVER):
            tried += 1
            text = f"question {number} of {count}"
            shim.fail(number, ERRORS[error], count)
            answer = server.client.post("/chats", data={"text": text, "key": new_id()})
            if answer.status_code not in MEANT or "Traceback" in answer.text:
                wrong.append((number, count, answer.status_code, answer.text[:200]))
            if answer.status_code != 303 and text not in answer.text:
                wrong.append((number, count, "the draft is gone"))
            if server.client.get("/livez").status_code != 200:
                wrong.append((number, count, "livez"))
            shim.mend()
            if answer.status_code == 303:
                chat = answer.headers["location"]
                page = settled(server, chat)
                acknowledged[chat] = text
                if text not in text_of(page):
                    wrong.append((number, count, "not shown"))
            again = server.ask("does it go on")  # works without a restart
            server.wait_for(ANSWERED, again)
            acknowledged[again] = "does it go on"
    if "Traceback" in server.log.read_text():
        wrong.append(server.log.read_text()[-3000:])
    server.kill()
    server = victim()
    wrong += [
        (chat, "lost") for chat, text in acknowledged.items() if text not in text_of(server.client.get(chat).text)
    ]
    server.kill()
    with sqlite3.connect(tmp_path / "data" / "notso.db") as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    ledger.note(
        "store",
        f"{error} during a turn: acknowledged message lost, invalid response, or no recovery without a restart",
        f"{tried} faults: each of {most} system calls of a turn, failing once or from then on; {len(acknowledged)}"
        " acknowledged",
        len(wrong),
    )


@pytest.mark.parametrize("error", ERRORS)
def test_disk_errors_at_start_and_shutdown_lose_no_data(tmp_path: Path, ledger: Ledger, error: str) -> None:
    kill_after(tmp_path / "killed", 3)
    shim = Shim(tmp_path, tmp_path / "data")
    told = run_program(IN_PROCESS, tmp_path, ERRORS[error], EACH, environment=shim.environment)
    faults, wrong = json.loads(told)
    ledger.note(
        "store",
        f"{error} at a start, in a turn, or at shutdown: acknowledged data lost, no recovery, or another error",
        f"{faults} faults: each system call fails once or from then on; then the data is opened again on a"
        " working disk",
        len(wrong),
    )
