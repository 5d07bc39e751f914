"""What a server holds and does while nobody asks: resident memory, wake-ups, and the seconds to the page's first byte.

    python benchmarks/idle.py [--seconds 20] [--front-end] [MODEL.gguf]

It begins a server of its own with the demo, or with that model, in a data directory that is thrown away; or a front end
beside such a server, which is ready by then and counts for nothing. Wake-ups are
the voluntary context switches of all its threads, counted after so many seconds of rest. Linux only.
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
"""So long what the start leaves behind is done: weights on large pages, captured steps, the folded log of the store."""

WAIT_SECONDS = 300.0


def wait_for(address: str, server: subprocess.Popen[bytes]) -> float:
    """Until the address gives its first byte; the time of that."""
    ends = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < ends and server.poll() is None:
        try:
            with urllib.request.urlopen(address, timeout=WAIT_SECONDS) as answer:
                answer.read(1)
                return time.monotonic()
        except OSError:  # nobody listens yet, or the model is being loaded
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
    parser.add_argument("model", nargs="?", type=Path, help="default: the demo")
    parser.add_argument("--seconds", type=float, default=20.0, help="to count wake-ups in")
    parser.add_argument("--front-end", action="store_true", help="measure one, whose engine is another server")
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
    machine, where = describe_machine(), ", computed elsewhere" if options.front_end else ""
    print(f"{machine['cpu']}, Python {machine['python']}; {options.model or 'the demo'}{where}")
    print(f"first byte of the page {page:.2f} s ({spent:.2f} s of the processors), ready {ready:.2f} s")
    print(f"{resident:.1f} MB resident, {anonymous:.1f} MB of it not of files; {woken:.2f} wake-ups a second")


if __name__ == "__main__":
    main()
