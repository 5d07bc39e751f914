"""`notso backup`: copy all conversations and documents to one SQLite file."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from notso.cli import options, terminal

if TYPE_CHECKING:
    from urllib.error import HTTPError

MAX_ERROR_BYTES = 4096

EXAMPLES = """\
  notso backup
  notso backup chats.db --from http://127.0.0.1:3000"""


def backup(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE", help="Output file; must not exist yet. Default: notso-backup-DATE.db in the current folder."
        ),
    ] = None,
    server: Annotated[
        str | None, typer.Option("--from", metavar="URL", help="Fetch the backup from the running server at this URL.")
    ] = None,
    data_dir: options.DataDir = None,
    api_key_file: options.ApiKeyFile = None,
    plain: options.Plain = False,
    debug: options.Debug = False,
) -> None:
    """Back up all conversations and documents to one file.

    To restore a backup, stop the server, delete notso.db-wal and notso.db-shm from the data directory, and copy the
    file there as notso.db. For conversations in PostgreSQL (DATABASE_URL), use pg_dump.
    """
    target = file or Path(f"notso-backup-{date.today().isoformat()}.db")
    copy_chats(target, server, data_dir, api_key_file)
    terminal.print_line(f"{target} ({terminal.gigabytes(target.stat().st_size)})")


def copy_chats(target: Path, server: str | None, data_dir: Path | None, api_key_file: Path | None) -> None:
    """Copy the chat database from `server` (None: the data directory) to a new file."""
    from notso.web.store.sqlite.store import back_up_directory
    from notso.web.values.settings import default_data_dir

    if os.environ.get("DATABASE_URL") and server is None and data_dir is None:
        from notso.web.store.protocol import BACKUP_ELSEWHERE
        from notso.web.values.errors import WebError

        raise WebError(BACKUP_ELSEWHERE)
    if server is None:
        with _create_private_file(target):
            back_up_directory(data_dir or default_data_dir(), target)
    else:
        key = options.api_key(api_key_file) or ""
        with _create_private_file(target):
            _download_backup(server, key, target)


@contextlib.contextmanager
def _create_private_file(target: Path) -> Iterator[None]:
    os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    try:
        yield
    except BaseException:
        target.unlink(missing_ok=True)
        raise


def open_url(url: str, timeout: float, headers: Mapping[str, str]) -> Any:
    """Open a URL. Raises OSError, HTTPException or ValueError."""
    from urllib.parse import urlsplit
    from urllib.request import ProxyHandler, Request, build_opener

    from notso.web.values.settings import is_loopback

    # For loopback addresses, ignore the proxies set in environment variables: they may be unable to connect to
    # this machine's loopback addresses, and would receive the API key.
    own_proxies = [ProxyHandler({})] if is_loopback(urlsplit(url).hostname or "") else []
    return build_opener(*own_proxies).open(Request(url, headers=dict(headers)), timeout=timeout)


def error_sentence(error: HTTPError) -> str:
    """Return the message in a server's error response, or else the response's status."""
    with error, contextlib.suppress(Exception):  # if the body cannot be parsed, return the status
        body, kind = error.read(MAX_ERROR_BYTES).decode(), error.headers.get_content_type()
        if kind == "application/json":
            fields = json.loads(body)
            body = fields["error"]["message"] if "error" in fields else fields["status"]
        if kind != "text/html" and (sentence := " ".join(body.split())):
            return sentence
    return str(error)


def _download_backup(server: str, key: str, target: Path) -> None:
    import ssl
    from http.client import HTTPException
    from urllib.error import HTTPError, URLError

    from notso.web.store.protocol import BACKUP_ELSEWHERE
    from notso.web.values.errors import StorageError, WebError

    # With this `Accept`, the server sends errors as JSON, not as web pages.
    headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    if not server.startswith(("http://", "https://")):
        raise WebError(f"{server} is not a valid URL: it must begin with http:// or https://")
    try:
        with open_url(server.rstrip("/") + "/backup", 600, headers) as answer, target.open("wb") as out:
            shutil.copyfileobj(answer, out)
            announced = answer.headers.get("Content-Length")
    except (URLError, HTTPException, ConnectionError, TimeoutError, ssl.SSLError, ValueError) as error:
        code = error.code if isinstance(error, HTTPError) else 0
        if code == 501:  # the server stores its conversations in PostgreSQL
            raise StorageError(f"{server} returned no backup: {BACKUP_ELSEWHERE}") from error
        cause: Any = error.reason if type(error) is URLError else error
        cause = error_sentence(error) if isinstance(error, HTTPError) else cause
        reason = "an operator's API key is required (--api-key-file)" if code in (401, 403) else cause
        raise WebError(f"{server} returned no backup: {getattr(reason, 'strerror', None) or reason}") from error
    # `copyfileobj` raises no error if the connection is closed early.
    if announced not in (None, str(target.stat().st_size)):
        raise WebError(f"{server} closed the connection before the backup was complete; run the command again")
    with target.open("rb") as copy:
        # If the key is invalid, the server may return its sign-in page instead of a backup.
        if copy.read(16) != b"SQLite format 3\0":
            raise WebError(f"{server} did not return a backup; the server may require an API key (--api-key-file)")
