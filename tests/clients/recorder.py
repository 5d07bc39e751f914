"""A server between a client and ours, which keeps what the client sent."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Request:
    """What was sent, and the status of its answer."""

    path: str
    body: bytes
    status: int


@dataclass(frozen=True)
class Answer:
    """What came back, whole."""

    status: int
    kind: str
    body: bytes


def post(address: str, body: bytes) -> Answer:
    """Send JSON there."""
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as answer:
            return Answer(answer.status, answer.headers["Content-Type"], answer.read())
    except urllib.error.HTTPError as error:
        return Answer(error.code, error.headers["Content-Type"], error.read())


@contextmanager
def recorder(address: str) -> Iterator[tuple[str, list[Request]]]:
    """The address that stands for `address`, and what was posted there, in the order of the answers."""
    kept: list[Request] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            answer = post(f"{address}{self.path}", body)
            kept.append(Request(self.path, body, answer.status))
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.kind)
            self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            self.wfile.write(answer.body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", kept
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
