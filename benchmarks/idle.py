"""Measure an idle server: resident memory, wake-ups, and the seconds from its start to the page's first byte.

    python benchmarks/idle.py [--seconds 20] [--front-end] [MODEL.gguf]

Starts a server with the demo model or the given model and a temporary data directory; with --front-end, starts and
measures a front end of such a server. Wake-ups are the voluntary context switches of all threads of the server, counted
for --seconds after a pause. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from notso.smollm3.diagnostics.benchmark import describe_machine

REST_SECONDS = 10.0
"""Time for background work after the start: copying weights, capturing steps, the database's checkpoint."""

WAIT_SECONDS = 300.0


def wait_for(address: str, server: subprocess.Popen[bytes]) -> float:
    """Wait until the address returns its first byte, and return the time."""
    ends = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < ends and server.poll() is None:
        try:
            with urllib.request.urlopen(address, timeout=WAIT_SECONDS) as answer:
                answer.read(1)
                return time.monotonic()
        except OSError:  # the server does not listen yet, or is loading the model
            time.sleep(0.01)
    raise SystemExit(f"{address} did not answer")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def number(path: Path, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+)", path.read_text(), re.MULTILINE)
    return int(found[1]) if found else 0


def switches(process: Path) -> int:
    return sum(number(status, "voluntary_ctxt_switches") for status in process.glob("task/*/status"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="default: the demo model")
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds to count wake-ups")
    parser.add_argument(
        "--front-end", action="store_true", help="measure a front end that uses another server's engine"
    )
    options = parser.parse_args()
    port, serving = free_port(), [sys.executable, "-m", "notso", "serve", "--no-browser", "--port"]
    command = [*serving, str(port)]
    model = ["--model", str(options.model)] if options.model else []
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with contextlib.ExitStack() as started, tempfile.TemporaryDirectory() as data:
        variables = os.environ | {"NOTSO_DATA_DIR": data, "NOTSO_ENGINE_KEY": "of this measurement only"}
        if options.front_end:
            behind = free_port()
            folder = started.enter_context(tempfile.TemporaryDirectory())
            engine = [*serving, str(behind), "--engine-api", *model]
            process = subprocess.Popen(engine, env=variables | {"NOTSO_DATA_DIR": folder}, **quiet)
            started.callback(process.wait)
            started.callback(process.terminate)
            wait_for(f"http://127.0.0.1:{behind}/health", process)
            command += ["--engine-url", f"http://127.0.0.1:{behind}"]
        else:
            command += model
        begun = time.monotonic()
        server = subprocess.Popen(command, env=variables, **quiet)
        try:
            page = wait_for(f"http://127.0.0.1:{port}/", server) - begun
            process = Path(f"/proc/{server.pid}")
            spent = sum(map(int, (process / "stat").read_text().rpartition(")")[2].split()[11:13])) / os.sysconf(
                "SC_CLK_TCK"
            )
            ready = wait_for(f"http://127.0.0.1:{port}/health", server) - begun
            time.sleep(REST_SECONDS)
            before = switches(process)
            time.sleep(options.seconds)
            woken = (switches(process) - before) / options.seconds
            resident, anonymous = (number(process / "status", name) * 1024 / 1e6 for name in ("VmRSS", "RssAnon"))
        finally:
            server.terminate()
            server.wait()
    machine, where = describe_machine(), ", front end only" if options.front_end else ""
    print(f"{machine['cpu']}, Python {machine['python']}; {options.model or 'demo model'}{where}")
    print(f"first byte of the page after {page:.2f} s ({spent:.2f} s of CPU time), ready after {ready:.2f} s")
    print(f"{resident:.1f} MB resident, of which {anonymous:.1f} MB anonymous; {woken:.2f} wake-ups per second")


if __name__ == "__main__":
    main()
