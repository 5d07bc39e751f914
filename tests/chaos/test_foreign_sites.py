"""Every route is requested from every kind of page, as SECURITY.md describes for hosts, sites and keys."""

from __future__ import annotations

import http.client
import itertools
import random
import re
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

from chaos.ledger import LONG, Ledger
from chaos.victim import ANSWERED, Victim
from scripted_engine import ScriptedEngine
from web.edge.test_access import inventory

from notso.web.app import create_app
from notso.web.edge.access import public
from notso.web.edge.security import SAFE_METHODS, is_costly_read
from notso.web.values.ids import new_id
from notso.web.values.settings import Settings

KEY = "correct horse battery staple"
HOSTS = ["own", "evil.example", "127.0.0.1.evil.example"]
ORIGINS = [None, "own", "http://evil.example", "null", "http://localhost:1"]
SITES = [None, "same-origin", "none", "same-site", "cross-site"]
KINDS = ["application/x-www-form-urlencoded", "application/json", "text/plain"]
SHORT_CELLS = 500

Cell = tuple[str, bool, str, str | None, str | None, str]


def expected(method: str, path: str, is_public: bool, host: str, origin: str | None, site: str | None) -> set[int]:
    """Return the status that must refuse a request without a key, or an empty set if the request is permitted."""
    if host != "own":
        return {421}
    foreign = site not in (None, "same-origin", "none") or (site is None and origin not in (None, "own"))
    if foreign and (method not in SAFE_METHODS or is_costly_read(path, b"")):
        return {403}
    return set() if is_public else {401}


def asked(
    server: Victim, connection: http.client.HTTPConnection, method: str, path: str, key: bool, cell: tuple[str, ...]
) -> int:
    """Send a request and return its status. The body is read unless it is an event stream."""
    host, origin, site, kind = cell
    own = f"127.0.0.1:{server.port}"
    headers = {"Host": own if host == "own" else host}
    headers |= {"Origin": f"http://{own}" if origin == "own" else origin} if origin is not None else {}
    headers |= {"Sec-Fetch-Site": site} if site is not None else {}
    headers |= {"x-api-key": KEY} if key else {}
    body = b"" if method in SAFE_METHODS else b"{}"
    connection.request(method, path, body, headers | ({"Content-Type": kind} if body else {}))
    answer = connection.getresponse()
    if "event-stream" in (answer.headers["content-type"] or ""):
        connection.close()
    else:
        answer.read()
    return answer.status


def test_every_route_enforces_host_and_origin_checks(
    victim: Callable[..., Victim], ledger: Ledger, tmp_path: Path
) -> None:
    routes = [
        (*operation.split(" ", 1), public in dependencies)
        for operation, dependencies in inventory(create_app(ScriptedEngine, Settings(data_dir=tmp_path / "none")))
    ]
    routes += [(method, "/chats/{chat_id}/delete", False) for method in ("DELETE", "PUT", "PATCH", "FROB")]
    server = victim(api_key=KEY)
    server.client.headers["x-api-key"] = KEY
    names = own_names(server)
    cells = list(itertools.product(routes, HOSTS, ORIGINS, SITES, KINDS))
    if not LONG:
        cells = random.Random(5).sample(cells, SHORT_CELLS)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    before = contents(server)
    failed = reads = 0
    for (method, template, is_public), *cell in cells:
        path = re.sub(r"\{(\w+)(:path)?\}", lambda found: names.get(found[1], new_id()), template)
        wanted = expected(method, path, is_public, *cell[:3])
        status = asked(server, connection, method, path, False, tuple(cell))
        unknown = method in ("DELETE", "PUT", "PATCH", "FROB") and not wanted & {421, 403} and status == 405
        failed += not unknown and (status not in wanted if wanted else status in (401, 421) or status >= 500)
        if method == "GET" and not is_costly_read(path, b""):  # with the key, reading the whole body
            reads += 1
            status = asked(server, connection, method, path, True, tuple(cell))
            failed += status >= 500 or (status == 421) != (cell[0] != "own")
    connection.close()
    failed += contents(server) != before
    ledger.note(
        "clients",
        "requests from other sites: combinations of Host, Origin, Sec-Fetch-Site, method and content type on all"
        " routes",
        f"{len(cells):,} combinations without the key, {reads:,} reads with the key; no stored data changed",
        failed,
    )


def own_names(server: Victim) -> dict[str, str]:
    """Create a chat with an answer, and return ids for the placeholders in paths."""
    chat = server.ask("a question of one's own")
    server.wait_for(ANSWERED, chat)
    page = server.client.get(chat).text
    message = re.search(r"/messages/([0-9a-f-]{36})", page)
    assert message is not None
    return {
        "chat_id": chat.removeprefix("/chats/"),
        "message_id": message[1],
        "kind": "json",
        "path": "page.css",
        "name": "Scripted",
    }


def contents(server: Victim) -> list[tuple[str, ...]]:
    """Return every row of every table."""

    def rows() -> Iterator[tuple[str, ...]]:
        for path in sorted(server.directory.glob("*.db")):
            with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
                for (table,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name"):
                    if not table.startswith(("search", "sqlite")):
                        for row in database.execute(f'SELECT * FROM "{table}"'):
                            yield (table, *map(str, row))

    return sorted(rows())
