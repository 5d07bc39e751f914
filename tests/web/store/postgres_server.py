"""A private PostgreSQL server for tests: Debian's binaries, a random port, and a temporary folder."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

MISSING = "PostgreSQL's server is not here (Debian's package `postgresql`)"
USER = "postgres"  # the user that Debian's package creates; PostgreSQL refuses to run as root
START_SECONDS = 60
TEMPLATES = Path(__file__).parents[3] / "build" / "postgres"


def binaries() -> Path | None:
    """Return the folder with the binaries of the newest PostgreSQL version."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: float(path.parts[-3]))
    if found:
        return found[-1].parent
    there = shutil.which("initdb")
    return Path(there).resolve().parent if there else None


class PostgresServer:
    """A PostgreSQL server on loopback. `durable`: sync to disk, as PostgreSQL does by default."""

    def __init__(self, folder: Path, *, durable: bool = False) -> None:
        bin_folder = binaries()
        if bin_folder is None or (os.getuid() == 0 and not _has_user()):
            pytest.skip(MISSING)
        self._bin, self._folder, self._durable = bin_folder, folder, durable
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self._names = 0
        self._process: subprocess.Popen[bytes] | None = None
        if os.getuid() == 0:
            shutil.chown(folder, USER, USER)
        self._create_data(folder / "data")
        self.start()

    @property
    def _where(self) -> list[str]:
        return ["-h", "127.0.0.1", "-p", str(self.port), "-U", USER]

    @property
    def address(self) -> str:
        return f"postgresql://{USER}@127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start on the same port as before and wait until the server responds.

        Call this from the main thread: the server ends with the thread that started it.
        """
        settings = {"port": self.port, "listen_addresses": "127.0.0.1", "unix_socket_directories": self._folder}
        settings |= {"log_min_messages": "panic", "max_connections": 60, "shared_buffers": "16MB"}
        settings |= {} if self._durable else {"fsync": "off", "full_page_writes": "off", "synchronous_commit": "off"}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        command = self._command("postgres", "-D", str(self._folder / "data"), *options)
        self._process = subprocess.Popen(command, cwd="/", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while self._run("psql", *self._where, "-d", "postgres", "-c", "SELECT 1").returncode != 0:
            assert self._process.poll() is None, "the server ended"

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """Stop the server: SIGINT aborts transactions and shuts down cleanly, SIGQUIT imitates a power failure."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(START_SECONDS)
            self._process = None

    def new_database(self) -> str:
        """Create an empty database and return its address."""
        self._names += 1
        name = f"test_{self._names}"
        made = self._run("createdb", *self._where, "-T", "template0", name)
        assert made.returncode == 0, made.stderr
        return f"{self.address}/{name}"

    def _create_data(self, data: Path) -> None:
        """Copy the data of a new server from an earlier run, because initdb takes ten times as long."""
        options = ["-U", USER, "-A", "trust", "-E", "UTF8", "--locale=C", "--lc-ctype=C.UTF-8", "--no-sync"]
        key = hashlib.sha256(repr((self._bin, os.getuid(), options)).encode()).hexdigest()[:16]
        if (TEMPLATES / key).exists():
            subprocess.run(["cp", "-a", str(TEMPLATES / key), str(data)], check=True)
            return
        told = self._run("initdb", "-D", str(data), *options)
        assert told.returncode == 0, told.stderr
        TEMPLATES.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=TEMPLATES) as folder:
            subprocess.run(["cp", "-a", str(data), folder], check=True)
            with contextlib.suppress(OSError):  # another worker was faster
                Path(folder, data.name).rename(TEMPLATES / key)

    def _run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = self._command(program, *arguments)
        return subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=START_SECONDS, check=False)

    def _command(self, program: str, *arguments: str) -> list[str]:
        """Build a command that runs as an allowed user and ends with the thread that starts it."""
        user = ["--reuid", USER, "--regid", USER, "--clear-groups"] if os.getuid() == 0 else []
        return ["setpriv", *user, "--pdeathsig", "QUIT", str(self._bin / program), *arguments]


@contextlib.contextmanager
def postgres_server(*, durable: bool = False) -> Iterator[PostgresServer]:
    """Run a server inside the context. Skip the test if PostgreSQL is not installed."""
    pytest.importorskip("psycopg", reason="the extra `postgres` is not installed")
    with tempfile.TemporaryDirectory(prefix="notso-postgres-", ignore_cleanup_errors=True) as folder:
        server = PostgresServer(Path(folder), durable=durable)
        try:
            yield server
        finally:
            server.stop(signal.SIGQUIT)


def _has_user() -> bool:
    try:
        pwd.getpwnam(USER)
    except KeyError:
        return False
    return True
