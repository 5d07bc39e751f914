"""PgBouncer in front of the database: session mode works, transaction mode is refused at startup."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from web.store.postgres_server import USER, PostgresServer
from web.store.some_chats import OWNER, a_chat, a_turn, finished, run_with_store

from notso.web.store.opening import query_database_info
from notso.web.values.errors import StorageError

PROGRAM = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="pgbouncer is not installed (Debian: apt-get install pgbouncer)"
)


@pytest.fixture
def bouncer(postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """Return a function that starts PgBouncer in a given mode before an empty database and returns its address."""
    running: list[subprocess.Popen[bytes]] = []

    def begin(mode: str) -> str:
        name = postgres.new_database().rpartition("/")[2]
        folder = tmp_path_factory.mktemp("bouncer")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        file = folder / "pgbouncer.ini"
        file.write_text(
            f"[databases]\n{name} = host=127.0.0.1 port={postgres.port} user={USER}\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = any\n"
            f"pool_mode = {mode}\nignore_startup_parameters = extra_float_digits\nserver_reset_query_always = 1\n"
        )
        as_user = ["setpriv", "--reuid", USER, "--regid", USER, "--clear-groups"] if os.getuid() == 0 else []
        for path in (*reversed(folder.parents), folder, file):
            if path.stat().st_uid == os.getuid() and path.is_relative_to(tmp_path_factory.getbasetemp().parent.parent):
                path.chmod(path.stat().st_mode | 0o055)
        command = [*as_user, str(PROGRAM), "-q", str(file)]
        running.append(subprocess.Popen(command, cwd="/", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        while True:
            assert running[-1].poll() is None, "pgbouncer ended"
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                return f"postgresql://{USER}@127.0.0.1:{port}/{name}"
            except ConnectionRefusedError:
                os.sched_yield()

    yield begin
    for each in running:
        each.kill()
        each.wait()


@pytest.mark.parametrize("mode", ["transaction", "statement"])
def test_transaction_and_statement_modes_are_refused(bouncer: Callable[[str], str], mode: str) -> None:
    from notso.web.store.postgres.store import PostgresStore

    address = bouncer(mode)
    with pytest.raises(StorageError, match=r"pooler in transaction mode.*pool_mode = session"):
        asyncio.run(PostgresStore(address).open())
    with pytest.raises(StorageError, match="pooler in transaction mode"):
        query_database_info(address)


def test_session_mode_works(bouncer: Callable[[str], str]) -> None:
    from notso.web.store.postgres.store import PostgresStore

    address = bouncer("session")
    assert query_database_info(address).version.startswith("PostgreSQL")
    chat = a_chat("Through PgBouncer")

    async def work(store: Any) -> None:
        await finished(store, a_turn(chat, "question"), "answer", chat)
        assert [each.content for each in await store.messages(OWNER, chat.id)] == ["question", "answer"]

    run_with_store(PostgresStore(address), work)
