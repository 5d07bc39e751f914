"""A relay between a browser and a server whose connections can be cut and restored."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class Wire:
    """Listens on its own port and forwards to the server. While cut, it drops all connections and refuses new ones."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._ends: set[socket.socket] = set()
        self._whole = True
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Cut all connections."""
        self._whole = False
        for end in list(self._ends):
            self._end(end)

    def mend(self) -> None:
        """Accept connections again."""
        self._whole = True

    def close(self) -> None:
        """Close the relay for good."""
        self.cut()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
                self._ends |= {near, far}
                if not self._whole:  # Check after both sides are registered, because `cut` may run at any moment.
                    self._end(near)
                    self._end(far)
                    continue
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(source, target), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                target.sendall(data)
        self._end(source)
        self._end(target)

    def _end(self, end: socket.socket) -> None:
        self._ends.discard(end)
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()
