"""Power failure at any system call: unsynced data is dropped or partly kept, and all acknowledged data is there."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from chaos.disk_shim import CREATE, CUT, SYNC, UNLINK, WRITE, Call, Shim
from chaos.killed_store import run_program
from chaos.ledger import LONG, Ledger
from chaos.stored_turns import shown, with_store

from notso.web.store.sqlite.store import SQLiteStore
from notso.web.values.errors import StorageError

TURNS = 12 if LONG else 5
POINTS = 1 if LONG else 23  # test every call, or every 23rd
TORN = 3 if LONG else 1  # number of states with partly kept data at each point
SECTORS = (512, 4096)

WRITER = """
import asyncio
import os
import sys
from pathlib import Path
from chaos.stored_turns import a_chat, save_turn
from notso.web.store.sqlite import store as sqlite
from notso.web.store.sqlite.store import SQLiteStore

data, turns = Path(sys.argv[1]), int(sys.argv[2])
sqlite.IDLE_SECONDS = 0.02

async def fill():
    store = SQLiteStore(data)
    await store.open()
    told = os.open(data / "notso.db-acknowledged", os.O_WRONLY | os.O_CREAT, 0o600)
    chat = a_chat()
    for number in range(turns):
        await save_turn(store, chat, number)
        os.write(told, str(number).encode())
        if number % 4 == 3:  # wait for a checkpoint of the log
            while (data / "notso.db-wal").stat().st_size:
                await asyncio.sleep(0.01)
        if number == turns // 2:  # a clean shutdown and restart
            await store.close()
            store = SQLiteStore(data)
            await store.open()
    await store.close()

asyncio.run(fill())
"""


HALVES = """SELECT id FROM messages asked WHERE role = 'user'
    AND NOT EXISTS (SELECT 1 FROM messages WHERE parent_id = asked.id)"""


@dataclass
class Disk:
    """The files as a power failure would leave them: synced data, and pending calls that may or may not have been
    written. A deleted file may reappear until its directory has been synced."""

    synced: dict[str, bytearray] = field(default_factory=dict)
    pending: dict[str, list[Call]] = field(default_factory=lambda: defaultdict(list))

    def take(self, call: Call) -> None:
        if call.error:
            return
        if call.kind == SYNC and not call.file.startswith("notso.db"):  # a sync of the directory
            for file, calls in list(self.pending.items()):
                gone = max((at for at, each in enumerate(calls, 1) if each.kind == UNLINK), default=0)
                if gone:
                    self.synced.pop(file, None)
                    self.pending[file] = calls[gone:]
        elif call.kind == SYNC:
            for each in self.pending.pop(call.file, []):
                _apply(self.synced, each)
            self.synced.setdefault(call.file, bytearray())
        elif call.kind != CREATE:
            self.pending[call.file].append(call)

    def found(self, keep: Callable[[Call], Iterator[Call]]) -> dict[str, bytearray]:
        """Return the files with the parts of pending calls that `keep` selects."""
        files = {name: bytearray(held) for name, held in self.synced.items()}
        for calls in self.pending.values():
            for call in calls:
                for part in keep(call):
                    _apply(files, part)
        return files


def _apply(files: dict[str, bytearray], call: Call) -> None:
    if call.kind == UNLINK:
        files.pop(call.file, None)
        return
    held = files.setdefault(call.file, bytearray())
    if call.kind == CUT:
        held[call.offset :] = b""
        held.extend(bytes(call.offset - len(held)))
    elif call.kind == WRITE:
        held.extend(bytes(max(0, call.offset + len(call.data) - len(held))))
        held[call.offset : call.offset + len(call.data)] = call.data


def dropped(call: Call) -> Iterator[Call]:
    yield from ()


def kept(call: Call) -> Iterator[Call]:
    yield call


def torn(rng: random.Random) -> Callable[[Call], Iterator[Call]]:
    """Return a `keep` that selects random sectors of random writes, regardless of their order."""
    sector = rng.choice(SECTORS)

    def keep(call: Call) -> Iterator[Call]:
        if call.kind != WRITE:
            yield from [call] if rng.random() < 0.5 else []
            return
        for at in range(0, len(call.data), sector):
            if rng.random() < 0.5:
                yield Call(WRITE, 0, call.file, call.data[at : at + sector], call.offset + at)

    return keep


def what_is_wrong(directory: Path, files: dict[str, bytearray], acknowledged: int) -> object:
    """Return None if all acknowledged data is stored and the rest is consistent, otherwise the error."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    for name, held in files.items():
        (directory / name).write_bytes(held)

    async def look(store: SQLiteStore) -> object:
        if store.read_only:
            return store.damage
        questions, answers = await shown(store)
        whole = list(range(acknowledged))
        if answers[:acknowledged] != whole or questions[: len(answers)] != answers or len(questions) - len(answers) > 1:
            return questions, answers
        return [row[0] for row in await store.read("", HALVES)]

    try:
        wrong = with_store(directory, look)
    except StorageError as error:
        return repr(error)
    with sqlite3.connect(directory / "notso.db") as db:
        check = db.execute("PRAGMA integrity_check").fetchall()
    db.close()
    return wrong or (None if check == [("ok",)] else check)


def test_power_loss_loses_no_acknowledged_data(tmp_path: Path, ledger: Ledger) -> None:
    data = tmp_path / "data"
    shim = Shim(tmp_path, data, trace=True)
    run_program(WRITER, data, TURNS, environment=shim.environment)
    rng, disk, acknowledged, wrong, points, tried = random.Random(2), Disk(), 0, [], 0, 0
    syncs = 0
    for number, call in enumerate(shim.calls()):
        if call.file.endswith("-acknowledged"):
            acknowledged += call.kind == WRITE
            continue
        if call.file.endswith("-shm"):  # the first process that opens the database recreates this file
            continue
        disk.take(call)
        syncs += call.kind == SYNC
        if number % POINTS and call.kind != UNLINK:
            continue
        points += 1
        ways = {"dropped": dropped, "kept": kept} | {f"torn {each}": torn(rng) for each in range(TORN)}
        for way, keep in ways.items():
            tried += 1
            found = what_is_wrong(tmp_path / "after", disk.found(keep), acknowledged)
            if found:
                wrong.append((number, call.kind, call.file, way, acknowledged, found))
    assert acknowledged == TURNS
    print(*wrong, sep="\n")
    ledger.note(
        "store",
        "power failure: acknowledged answer missing, incomplete turn, file that fails its check, false alarm",
        f"{tried} disk states after {points} of the system calls ({syncs} of them syncs) of {TURNS} turns, two starts"
        " and two stops; unsynced data dropped, kept, or partly kept, in sectors of 512 or 4,096 bytes in any order",
        len(wrong),
    )
