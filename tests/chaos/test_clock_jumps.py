"""The system clock is set back by an hour and forward by a year while the server runs; no data is lost and nothing
hangs."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable
from pathlib import Path

from chaos.disk_shim import Shim
from chaos.ledger import LONG, Ledger
from chaos.victim import ANSWERED, Victim
from web.conftest import Running

HOUR, YEAR = 3600, 365 * 86_400
JUMPS = (YEAR, -HOUR, 0, -YEAR, HOUR, 0) * 3 if LONG else (YEAR, -HOUR)  # relative to the true time
RATE = 20

PURGE = "purge now"
PURGES = "purges"  # file that grows by a byte per purge
QUICK = f"""PURGE = {PURGE!r}
from notso.web import app
from notso.web.store.sql import store
app.PURGE_SECONDS = 0.02
app.UNDO_SECONDS = 3600.0
store.MAX_RESPONSES = 3
purge = store.SQLStore.purge

async def counted(*given):
    deleted = await purge(*given)
    with Path(sys.argv[1]).with_name({PURGES!r}).open("ab") as file:
        file.write(b".")
    return deleted

store.SQLStore.purge = counted

def script(messages, thinking):
    if messages[-1].content == PURGE:
        app.UNDO_SECONDS = 0.0
    yield from say(messages[-1].content, piece=4096)
"""


def trashed(directory: Path) -> int:
    with sqlite3.connect(f"file:{directory / 'notso.db'}?mode=ro", uri=True) as db:
        found = db.execute("SELECT count(*) FROM trash").fetchone()[0]
    db.close()
    return int(found)


def wait_for_purge(directory: Path) -> None:
    """Wait for the end of a purge that begins after this call."""
    file = directory.with_name(PURGES)

    def count() -> int:
        return file.stat().st_size if file.exists() else 0

    before = count()
    Running.wait(lambda: count() >= before + 2)  # the first of them may be running already


def keep_response(server: Victim) -> str:
    answer = server.client.post("/v1/responses", json={"input": "keep this"})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def test_system_clock_jumps_lose_no_data(tmp_path: Path, victim: Callable[..., Victim], ledger: Ledger) -> None:
    shim = Shim(tmp_path, tmp_path / "data")
    server = victim(QUICK, environment=shim.environment, requests_per_minute=RATE)
    wrong: list[object] = []
    chat = server.ask("question 0")
    server.wait_for(ANSWERED, chat)
    for number, jump in enumerate(JUMPS, 1):
        # a running answer
        server.ask(f"question {number}", chat)
        thrown = server.ask("to be deleted")
        server.wait_for(ANSWERED, thrown)
        kept = [keep_response(server) for _ in range(3)]
        answer = server.client.post(f"{thrown}/delete", data={})
        undo = re.findall(r"undo=([0-9a-f]{32})", answer.headers["location"])[0]
        while server.client.post("/tokenize", json={"content": "x"}).status_code != 429:
            pass

        shim.set("clock_seconds", jump)
        if server.client.get("/livez").status_code != 200:
            wrong.append((number, jump, "livez"))
        if server.client.post("/tokenize", json={"content": "x"}).status_code != 200:
            wrong.append(
                (number, jump, "a client at its rate limit is refused until the clock reaches the old time again")
            )
            shim.set("clock_seconds", YEAR * 10)
            server.client.post("/tokenize", json={"content": "x"})
            shim.set("clock_seconds", jump)
        wait_for_purge(tmp_path / "data")  # it may not remove what can still be undone
        if (
            server.client.post(f"/undo/{undo}", data={}).status_code != 303
            or server.client.get(thrown).status_code != 200
        ):
            wrong.append((number, jump, "deleted for good before it could be undone"))
        kept.append(keep_response(server))
        if server.client.get(f"/v1/responses/{kept[-1]}").status_code != 200:
            wrong.append((number, jump, "a response that was kept is gone"))
        if server.client.get(f"/v1/responses/{kept[0]}").status_code != 404:
            wrong.append((number, jump, "the oldest response was kept"))
        Running.wait(lambda: not re.search(r'data-state="(queued|running)"', server.client.get(chat).text))
        order = [int(each) for each in re.findall(r"question (\d+)", server.client.get(f"{chat}/export/md").text)]
        if order != sorted(order) or set(order) != set(range(number + 1)):
            wrong.append((number, jump, "order", order))
        if re.search(r'data-state="failed"', server.client.get(chat).text):
            wrong.append((number, jump, "an answer failed"))
    server.client.post(f"{chat}/delete", data={})
    shim.set("clock_seconds", -2 * YEAR)
    server.ask(PURGE)
    Running.wait(lambda: not trashed(tmp_path / "data"))  # what was deleted is gone in the end
    ledger.note(
        "store",
        "clock set while the server is running: data lost or purged early, wrong order, or a client locked out",
        f"{len(JUMPS)} jumps of an hour or a year, forward and back, each during an answer, with a deletion to undo,"
        " stored responses at their limit, and an address at its rate limit",
        len(wrong),
    )
