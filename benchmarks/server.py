"""Measure how much readers of streams slow down decoding on a real server, alternating between no readers and many.

    notso synth build/words-3b.gguf --tokenizer tokenizer.json
    python benchmarks/server.py build/words-3b.gguf --readers 200

The file needs a tokenizer whose tokens are text; otherwise, the streams are empty. Readers are sockets of this process
that are read once a second, so that they take little CPU time, which is reported.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from notso import __version__
from notso.smollm3.diagnostics.benchmark import StolenTime, describe_machine
from notso.web.values.ids import new_id

COUNTER = "notso_generation_tokens_total"
START_SECONDS = 120.0
WAIT_SECONDS = 3.0


class Server:
    """A process of `notso serve` with a temporary data directory."""

    def __init__(self, file: Path, options: list[str], data_limit_mib: int | None = None) -> None:
        def limited() -> None:
            if data_limit_mib is not None:
                resource.setrlimit(resource.RLIMIT_DATA, (data_limit_mib << 20, data_limit_mib << 20))

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.folder = tempfile.TemporaryDirectory()
        command = [sys.executable, "-m", "notso", "serve", "--model", str(file), "--port", str(self.port)]
        command += ["--data-dir", self.folder.name, *options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, preexec_fn=limited)
        ends = time.monotonic() + START_SECONDS
        while True:
            try:
                self.get("/health")
                return
            except OSError:
                if time.monotonic() > ends or self.process.poll() is not None:
                    self.close()
                    sys.exit("the server did not start")
                time.sleep(0.2)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
            return str(answer.read().decode())

    def ask(self, text: str) -> str:
        """Start a chat and return the path of its answer's stream."""
        form = urllib.parse.urlencode({"text": text, "key": new_id(), "thinking": "on"}).encode()
        origin = {"Origin": f"http://127.0.0.1:{self.port}"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/chats", form, origin)
        with urllib.request.urlopen(request, timeout=60) as answer:
            page = answer.read().decode()
        found = re.search(r"/generations/[\w-]+/events", page)
        if found is None:
            sys.exit("the page has no stream")
        return found.group()

    def generated(self) -> float:
        """Return the number of tokens generated since the server started."""
        found = re.search(rf"^{COUNTER}(?:{{.*}})? ([\d.e+]+)$", self.get("/metrics"), re.MULTILINE)
        if found is None:
            sys.exit(f"the server has no metric {COUNTER}")
        return float(found.group(1))

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()
        self.folder.cleanup()


class Readers:
    """Open streams, each on a separate connection."""

    def __init__(self, port: int, path: str, count: int) -> None:
        head = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAccept: text/event-stream\r\n\r\n".encode()
        self.received = 0
        self.sockets = []
        for _ in range(count):
            reader = socket.create_connection(("127.0.0.1", port))
            reader.sendall(head)
            reader.setblocking(False)
            self.sockets.append(reader)

    def drain(self) -> None:
        for reader in self.sockets:
            try:
                while data := reader.recv(1 << 18):
                    self.received += len(data)
            except BlockingIOError:
                continue

    def close(self) -> None:
        for reader in self.sockets:
            reader.close()


def rate(server: Server, readers: Readers, seconds: float) -> float:
    """Return the tokens per second while `readers` are connected."""
    until = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < until:
        readers.drain()
        time.sleep(0.5)
    before, started = server.generated(), time.monotonic()
    while (passed := time.monotonic() - started) < seconds:
        readers.drain()
        time.sleep(min(1.0, seconds - passed))
    return (server.generated() - before) / (time.monotonic() - started)


def keep(figures: dict[str, Any], stolen: StolenTime, out: Path | None) -> None:
    """Print results with the machine and the version, and write them to `out`."""
    machine = describe_machine() | {"stolen_percent": round(stolen.percent(), 2)}
    text = json.dumps({"machine": machine, "version": __version__, **figures}, indent=1)
    print(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--readers", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=15.0, help="duration of each measurement")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    given = parser.parse_args()

    stolen = StolenTime()
    server = Server(given.file, ["--weights", "packed"])
    alone: list[float] = []
    watched: list[float] = []
    received = 0
    try:
        path = server.ask("Tell me a long story.")
        time.sleep(WAIT_SECONDS * 3)  # until the prompt is processed and the weights are copied
        own = time.process_time()
        for _ in range(given.repeat):
            alone.append(rate(server, Readers(server.port, path, 0), given.seconds))
            readers = Readers(server.port, path, given.readers)
            watched.append(rate(server, readers, given.seconds))
            readers.close()
            received += readers.received
        own = time.process_time() - own
    finally:
        server.close()
    if not received:
        sys.exit("the streams were empty")
    measured = 2 * given.repeat * (given.seconds + WAIT_SECONDS)
    figures: dict[str, Any] = {
        "readers": given.readers,
        "tok_s_alone": round(statistics.median(alone), 3),
        "tok_s_with_readers": round(statistics.median(watched), 3),
        "cost_percent": round(100 * (1 - statistics.median(watched) / statistics.median(alone)), 2),
        "alone": [round(value, 3) for value in alone],
        "with_readers": [round(value, 3) for value in watched],
        "received_mb": round(received / 1e6, 2),
        "readers_cpu_percent": round(100 * own / measured, 2),
    }
    keep(figures, stolen, given.out)


if __name__ == "__main__":
    main()
