"""`notso backup`: a copy of every conversation, in one file that can stand in the database's place."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Annotated

import typer

from notso.cli import options, terminal

EXAMPLES = """\
  notso backup
  notso backup chats.db --from http://127.0.0.1:3000"""


def backup(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="Must not exist. Default: notso-backup-DATE.db here.", show_default=False),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option("--from", metavar="URL", help="Ask a server that is running; it owns its data directory."),
    ] = None,
    data_dir: options.DataDir = None,
    api_key_file: options.ApiKeyFile = None,
    debug: options.Debug = False,
) -> None:
    """Copy all conversations to one file.

    To go back to it, stop the server and put the file in the data directory as notso.db, with no notso.db-wal there.
    Conversations in PostgreSQL (DATABASE_URL) are its own pg_dump's to back up.
    """
    target = file or Path(f"notso-backup-{date.today().isoformat()}.db")
    copy_chats(target, server, data_dir, api_key_file)
    terminal.say(f"{target} ({terminal.gigabytes(target.stat().st_size)})")


def copy_chats(target: Path, server: str | None, data_dir: Path | None, api_key_file: Path | None) -> None:
    """All conversations to a new file: from a server where one is named, else from the data directory."""
    from notso.web.store.sqlite.backup import back_up
    from notso.web.values.settings import default_data_dir

    if os.environ.get("DATABASE_URL") and server is None and data_dir is None:
        from notso.web.store.protocol import BACKUP_ELSEWHERE
        from notso.web.values.errors import StorageError

        raise StorageError(BACKUP_ELSEWHERE)
    if server is None:
        with _new(target):
            back_up(data_dir or default_data_dir(), target)
    else:
        key = options.api_key(api_key_file) or ""
        with _new(target):
            _fetch(server, key, target)


@contextlib.contextmanager
def _new(target: Path) -> Iterator[None]:
    """A file only its owner can read, that was not there before and is gone again if it does not become whole."""
    os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    try:
        yield
    except BaseException:
        target.unlink(missing_ok=True)
        raise


def _fetch(server: str, key: str, target: Path) -> None:
    from urllib.error import URLError
    from urllib.request import Request, urlopen

    from notso.web.values.errors import WebError

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    if not server.startswith(("http://", "https://")):
        raise WebError(f"{server} is no address: it begins with http:// or https://")
    try:
        request = Request(server.rstrip("/") + "/backup", headers=headers)
        with urlopen(request, timeout=600) as answer, target.open("wb") as out:
            shutil.copyfileobj(answer, out)
    except URLError as error:
        raise WebError(f"{server} gave no backup: {error}") from error
    with target.open("rb") as copy:
        if copy.read(16) != b"SQLite format 3\0":
            raise WebError(f"{server} gave something else than a backup: is its key needed?")
