"""Measure the overhead of running several servers instead of one: time to the first token, and token rate.

    python benchmarks/replica_overhead.py valkey://127.0.0.1:6379 --rounds 40
    python benchmarks/replica_overhead.py --front-end --rounds 40

Compares two servers with the demo model: a single server, and either a server that shares its answers through Valkey or
a server behind a front end. Both receive questions alternately through the chat page, as from a browser, so that other
load on the machine affects both; medians over all rounds are reported, with the CPU time per question of each server. A
question that is answered before its page arrives, as can happen on a busy machine, is repeated.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from notso.smollm3.diagnostics.benchmark import describe_machine
from notso.web.values.ids import new_id

QUESTION = "Tell me of NoPE, of GGUF files, and who you are."


class Server:
    """A process of `notso serve` with additional options."""

    def __init__(self, folder: Path, *options: str) -> None:
        command = [sys.executable, "-m", "notso", "serve", "--port", "0", "--no-browser", "--json"]
        command += ["--data-dir", str(folder), *options]
        command += [] if "--engine-url" in options else ["--threads", "1", "--cache-disk", "0"]
        environment = {name: value for name, value in os.environ.items() if name != "VALKEY_URL"}
        environment["NOTSO_ENGINE_KEY"] = "of this measurement only"
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self._process.stdout is not None
        self.url = next(
            json.loads(line)["url"] for line in self._process.stdout if json.loads(line)["event"] == "open"
        ).rstrip("/")
        self.client = httpx.Client(base_url=self.url, timeout=120)
        while self.client.get("/health").status_code != 200:
            time.sleep(0.05)

    def ask(self) -> tuple[float, float]:
        """Return the milliseconds to the first word of the answer, and the tokens per second after it."""
        began = time.perf_counter()
        answer = self.client.post("/chats", data={"text": QUESTION, "key": new_id()}, follow_redirects=True)
        generation = next(iter(re.findall(r"/generations/([\w-]+)/events", answer.text)), None)
        if generation is None:
            return self.ask()
        first, usage = 0.0, ""
        with self.client.stream("GET", f"/generations/{generation}/events") as events:
            for line in events.iter_lines():
                if not first and re.search(r"-(?:answer|reasoning)-(?:tail|closed)[^>]*>.*[a-z]", line):
                    first = time.perf_counter()
                if '"completion_tokens"' in line:
                    usage = line
        said = json.loads(usage.partition("data: ")[2])
        return 1000 * (first - began), 1000 * said["completion_tokens"] / said["completion_ms"]

    def cpu_ms(self) -> float:
        """Return the CPU time of the process in milliseconds."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return 1000 * (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        self.client.close()
        self._process.terminate()
        self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("valkey_url", nargs="?")
    parser.add_argument("--front-end", action="store_true", help="measure a front end, not Valkey")
    parser.add_argument("--rounds", type=int, default=40)
    asked = parser.parse_args()
    if asked.valkey_url is None and not asked.front_end:
        parser.error("give the URL of Valkey, or --front-end")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:

        def start(name: str, *options: str) -> Server:
            return running.enter_context(contextlib.closing(Server(Path(folder) / name, *options)))

        servers = {"alone": start("alone")}
        behind: list[Server] = []
        if asked.front_end:
            name, behind = "front end", [start("engine", "--engine-api")]
            servers[name] = start("front", "--engine-url", behind[0].url)
        else:
            name = "with Valkey"
            servers[name] = start("shared", "--valkey-url", asked.valkey_url)
        everybody = servers | ({"its engine": behind[0]} if behind else {})
        figures: dict[str, list[tuple[float, float]]] = {name: [] for name in servers}
        began: dict[str, float] = {}
        for number in range(asked.rounds + 2):
            if number == 2:
                began = {name: server.cpu_ms() for name, server in everybody.items()}
            for name in sorted(servers, reverse=number % 2 == 1):
                measured = servers[name].ask()
                if number >= 2:
                    figures[name].append(measured)
        cpu = {name: (server.cpu_ms() - began[name]) / asked.rounds for name, server in everybody.items()}
    second = list(figures)[1]
    for name, each in figures.items():
        first, rate = zip(*each, strict=True)
        print(
            f"{name}: first token {statistics.median(first):.1f} ms, then {statistics.median(rate):.1f} tokens/s;"
            f" {cpu[name]:.1f} ms of CPU time per question"
        )
    if "its engine" in cpu:
        print(f"its engine: {cpu['its engine']:.1f} ms of CPU time per question")
    differences = [b[0] - a[0] for a, b in zip(figures["alone"], figures[second], strict=True)]
    print(f"difference of the first token, median of pairs: {statistics.median(differences):+.1f} ms")
    print(json.dumps(describe_machine()))


if __name__ == "__main__":
    main()
