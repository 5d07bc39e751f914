"""A proxy between a client and our server that records the client's requests."""

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
    """A recorded request and the status of its response."""

    path: str
    body: bytes
    status: int


@dataclass(frozen=True)
class Answer:
    """A complete response."""

    status: int
    kind: str
    body: bytes


def post(address: str, body: bytes) -> Answer:
    """Send a POST request with JSON."""
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as answer:
            return Answer(answer.status, answer.headers["Content-Type"], answer.read())
    except urllib.error.HTTPError as error:
        return Answer(error.code, error.headers["Content-Type"], error.read())


@contextmanager
def recorder(address: str) -> Iterator[tuple[str, list[Request]]]:
    """Run a proxy for `address`. Yield its own address and the list of recorded requests, in the order of the
    responses."""
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
            """Print no log lines."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", kept
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
