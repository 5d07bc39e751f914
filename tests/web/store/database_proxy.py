"""A proxy between a store and its database that counts round trips and can stop responding."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit


class DatabaseProxy:
    """A proxy for PostgreSQL connections.

    `trips`: number of requests that followed a response. `silent`: accept data without forwarding it.
    """

    def __init__(self, url: str) -> None:
        self.trips = 0
        self._loud = threading.Event()
        self._loud.set()
        self._there = (urlsplit(url).hostname, urlsplit(url).port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = [self._listener]
        self.url = url.replace(f":{urlsplit(url).port}", f":{self._listener.getsockname()[1]}")
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def silent(self) -> bool:
        return not self._loud.is_set()

    @silent.setter
    def silent(self, silent: bool) -> None:
        self._loud.clear() if silent else self._loud.set()

    def close(self) -> None:
        self._loud.set()
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._there)
                self._sockets += [client, server]
                answered = [True]
                for pair in ((client, server), (server, client)):
                    threading.Thread(
                        target=self._pass_on, args=(*pair, pair[0] is client, answered), daemon=True
                    ).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, is_client: bool, answered: list[bool]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                self._loud.wait()
                if is_client and answered[0]:
                    self.trips += 1
                answered[0] = not is_client
                target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def database_proxy(url: str) -> Iterator[DatabaseProxy]:
    """Run a proxy in front of the database at `url`."""
    proxy = DatabaseProxy(url)
    try:
        yield proxy
    finally:
        proxy.close()
