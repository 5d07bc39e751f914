"""Log or database deleted, truncated or overwritten after a kill: the store reports it, opens read-only, and keeps the
rest."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from chaos.killed_store import kill_after
from chaos.ledger import LONG, Ledger
from chaos.stored_turns import shown, with_store

from notso.web.store.sqlite.store import SQLiteStore
from notso.web.values.errors import StorageDamagedError

TURNS = 60 if LONG else 12
SMASHED = 400 if LONG else 40

Damaging = Callable[[Path], object]


def zero(path: Path, at: int, count: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes(count))


DAMAGE: dict[str, Damaging] = {
    "log deleted": lambda data: (data / "notso.db-wal").unlink(),
    "log and its index deleted": lambda data: [(data / f"notso.db-{end}").unlink() for end in ("wal", "shm")],
    "log cut to nothing": lambda data: os.truncate(data / "notso.db-wal", 0),
    "log cut by half": lambda data: os.truncate(data / "notso.db-wal", (data / "notso.db-wal").stat().st_size // 2),
    "header of the log zeroed": lambda data: zero(data / "notso.db-wal", 0, 32),
    "middle of the log zeroed": lambda data: zero(
        data / "notso.db-wal", (data / "notso.db-wal").stat().st_size // 2, 4096
    ),
    "database deleted": lambda data: (data / "notso.db").unlink(),
    "database cut to nothing": lambda data: os.truncate(data / "notso.db", 0),
    "database zeroed": lambda data: zero(data / "notso.db", 0, (data / "notso.db").stat().st_size),
    "all files but the commit counter deleted": lambda data: [
        path.unlink() for path in data.glob("notso.db*") if path.suffix != ".db-commits"
    ],
}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("killed") / "data"
    kill_after(directory, TURNS)
    return directory


def outcome(directory: Path) -> tuple[str, int]:
    """Return "well", "read-only" or "refused", and the number of answers that can be read."""

    async def look(store: SQLiteStore) -> tuple[str, int]:
        return "read-only" if store.read_only else "well", len((await shown(store))[1])

    try:
        return with_store(directory, look)
    except StorageDamagedError:
        return "refused", 0


def sizes(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name in ("notso.db", "notso.db-wal")}


def test_lost_log_or_database_is_detected(killed: Path, tmp_path: Path, ledger: Ledger) -> None:
    failed = []
    for what, damage in DAMAGE.items():
        data = tmp_path / what.replace(" ", "-")
        shutil.copytree(killed, data)
        damage(data)
        left = sizes(data)
        how, answers = outcome(data)
        if how == "well":
            failed.append((what, answers))
        elif {name: held for name, held in sizes(data).items() if held} != {
            n: held for n, held in left.items() if held
        }:
            failed.append((what, -1))
    whole = tmp_path / "whole"
    shutil.copytree(killed, whole)
    if outcome(whole) != ("well", TURNS):
        failed.append(("nothing", 0))
    tried = f"{len(DAMAGE)} kinds of damage after a kill, {TURNS} turns acknowledged: {', '.join(DAMAGE)}"
    ledger.note(
        "store", "log or database lost after an unclean shutdown, and not noticed at the next start", tried, len(failed)
    )


def test_damaged_log_is_never_read_as_a_shorter_log(killed: Path, tmp_path: Path, ledger: Ledger) -> None:
    rng, failed = random.Random(15), []
    log = (killed / "notso.db-wal").read_bytes()
    for number in range(SMASHED):
        data = tmp_path / "data"
        shutil.rmtree(data, ignore_errors=True)
        shutil.copytree(killed, data)
        smashed = bytearray(log)
        at = rng.randrange(len(smashed))
        match number % 3:
            case 0:
                smashed[at] ^= 1 << rng.randrange(8)
            case 1:
                del smashed[at:]
            case 2:
                smashed[at : at + 512] = rng.randbytes(len(smashed[at : at + 512]))
        (data / "notso.db-wal").write_bytes(smashed)
        how, answers = outcome(data)
        if how == "well" and answers < TURNS:
            failed.append((number, at, answers))
    tried = f"{SMASHED} logs with a flipped bit, 512 random bytes, or truncated, at random places"
    ledger.note("store", "acknowledged answers missing without notice", tried, len(failed))
