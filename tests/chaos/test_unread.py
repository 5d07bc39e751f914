"""Clients that send requests and do not read: their memory is bounded, they are dropped, and other clients are
served."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
import time
from collections.abc import Callable

from chaos.ledger import LONG, Ledger
from chaos.victim import Victim, Witness

FEW_DESCRIPTORS = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (512, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
"""
SMALL_WINDOW_BYTES = 4096
AT_REST = 24  # descriptors for visitors and database readers, whose number varies
SEND_SECONDS = 30 if LONG else 1


class Crowd:
    """Connections that send `request` and read nothing. Dropped ones are replaced until `stay_away` is called."""

    def __init__(self, victim: Victim, size: int, request: bytes = b"", pause_seconds: float = 0.0) -> None:
        self._pause = pause_seconds
        self._victim, self._size, self._request = victim, size, request
        self._clients: dict[int, socket.socket] = {}
        self._poll = select.poll()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.opened = self.dropped = 0

    def __enter__(self) -> Crowd:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stay_away()
        for client in self._clients.values():
            client.close()

    def stay_away(self) -> None:
        """Open no more connections; the existing ones stay open and read nothing."""
        self._over.set()
        self._thread.join()

    def wait_for_drops(self, number: int, seconds: float = 230) -> None:
        deadline = time.monotonic() + seconds
        while self.dropped < number:
            assert time.monotonic() < deadline, f"{self.dropped} of {self.opened} were dropped"
            time.sleep(0.05)

    def _run(self) -> None:
        while not self._over.is_set():
            if len(self._clients) < self._size:
                self._open()
            for number, _ in self._poll.poll(0 if len(self._clients) < self._size else 50):
                self._poll.unregister(number)
                self._clients.pop(number).close()
                self.dropped += 1

    def _open(self) -> None:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_WINDOW_BYTES)
        client.settimeout(1)
        try:
            client.connect(("127.0.0.1", self._victim.port))
        except OSError:
            client.close()
            self._over.wait(0.05)
            return
        client.settimeout(0.01)
        with contextlib.suppress(OSError):
            client.sendall(self._request)
        self._clients[client.fileno()] = client
        self._poll.register(client, 0)  # reports only the end of the connection
        self.opened += 1
        if self._pause:
            self._over.wait(self._pause)


def test_pipelining_clients_that_never_read_are_dropped(victim: Callable[..., Victim], ledger: Ledger) -> None:
    size = 420 if LONG else 12  # the server creates more than a hundred pages for each before its buffers are full
    server = victim(FEW_DESCRIPTORS, send_timeout_seconds=SEND_SECONDS)
    request = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 200
    with Witness(server) as witness:
        before = server.descriptors()
        with Crowd(server, size, request) as crowd:
            if LONG:
                time.sleep(75)
            else:
                crowd.wait_for_drops(size)
            crowd.stay_away()
            left = _left(server, before)
    ledger.note(
        "clients",
        "sockets with small windows that pipeline requests and read nothing",
        f"{crowd.opened} connections, {size} at a time, initially with 512 descriptors",
        left + witness.page.failed + witness.livez.failed,
        witness.figures | {"dropped": crowd.dropped, "descriptors": witness.descriptors_peak},
    )


def test_clients_that_never_read_exports_are_dropped(victim: Callable[..., Victim], ledger: Ledger) -> None:
    size, megabytes = (60, 13.5) if LONG else (6, 4)
    server = victim(send_timeout_seconds=SEND_SECONDS)
    messages = [
        {"role": ("user", "assistant")[at % 2], "content": "word " * 50_000} for at in range(int(megabytes * 4))
    ]
    answer = server.client.post(
        "/import", content=json.dumps(messages), headers={"Content-Type": "application/json"}, timeout=120
    )
    assert answer.status_code == 303, answer.text
    request = b"GET /export HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with Witness(server) as witness:
        before = server.descriptors()
        with Crowd(server, size, request) as crowd:
            if LONG:
                time.sleep(60)
            else:
                crowd.wait_for_drops(size)
            crowd.stay_away()
            left = _left(server, before)
        assert len(server.client.get("/export").json()["chats"]) == 2, "a client that reads gets everything"
    ledger.note(
        "clients",
        f"exports of {megabytes:g} MB that are never read",
        f"{crowd.opened} requested, {size} at a time",
        left + witness.page.failed + witness.livez.failed,
        witness.figures | {"dropped": crowd.dropped},
    )


def _left(server: Victim, before: int) -> int:
    """Return how many more descriptors are open than before, once the send timeout has certainly passed."""
    deadline = time.monotonic() + 3 * SEND_SECONDS + 10
    while (left := server.descriptors() - before - AT_REST) > 0 and time.monotonic() < deadline:
        time.sleep(0.1)
    return max(0, left)
