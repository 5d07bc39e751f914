"""Measure how evenly tokens arrive at many concurrent readers, while some of them disconnect during an answer.

    python benchmarks/stream_readers.py src/notso/demo/demo.gguf

Each reader requests streamed chat completions one after another. The results are the times between two pieces of an
answer, as received from the socket, and failures: a status other than 200, an error in a stream, and a stream that ends
without a finish reason or `[DONE]`. A reader that is rejected because too many requests wait (429) retries after the
seconds in Retry-After, as clients do. Rejections are expected and counted: all readers start at once, and only 32
requests may wait for admission to the engine. Readers are sockets of this process, on the same cores as the
server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from server import Server, keep

from notso.smollm3.diagnostics.benchmark import StolenTime

QUESTIONS = ("What is NoPE?", "Tell me of GGUF files.", "Who are you?", "Write a list of three things.")
MOST_PIECES_READ = 24
"""Maximum pieces that a reader receives before it disconnects early."""
TOLD_TO_WAIT = "told to wait"
CLOSING_SECONDS = 60.0
"""Time for answers that still run at the end; after it, an answer counts as incomplete."""


class Readers:
    """Concurrent readers. `seen` counts streams by outcome; `gaps` are times between pieces in milliseconds."""

    def __init__(self, port: int, leaving: float, max_tokens: int) -> None:
        self.seen: Counter[str] = Counter()
        self.gaps: list[float] = []
        self._port = port
        self._leaving = leaving
        self._max_tokens = max_tokens

    async def run(self, count: int, seconds: float) -> None:
        """Run `count` readers for `seconds`; answers that are running then are read to their end."""
        ends = time.monotonic() + seconds
        reading = [asyncio.create_task(self._read_on(number, ends)) for number in range(count)]
        _, late = await asyncio.wait(reading, timeout=seconds + CLOSING_SECONDS)
        self.seen["incomplete"] += len(late)
        for each in late:
            each.cancel()
        await asyncio.gather(*reading, return_exceptions=True)

    async def _read_on(self, number: int, ends: float) -> None:
        chance = random.Random(number)
        while time.monotonic() < ends:
            leaves_after = chance.randrange(1, MOST_PIECES_READ) if chance.random() < self._leaving else None
            try:
                self.seen[await self._read(chance, leaves_after)] += 1
            except OSError as error:
                self.seen[f"error: {type(error).__name__}"] += 1

    async def _read(self, chance: random.Random, leaves_after: int | None) -> str:
        """Read a stream and return its outcome."""
        asked = {
            "messages": [{"role": "user", "content": chance.choice(QUESTIONS)}],
            "max_tokens": self._max_tokens,
            "seed": chance.getrandbits(32),
            "ignore_eos": True,
            "stream": True,
        }
        body = json.dumps(asked).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(head.encode() + body)
            status = (await reader.readline()).split()
            if status[1:2] == [b"429"]:
                await asyncio.sleep(await self._retry_after(reader))
                return TOLD_TO_WAIT
            if status[1:2] != [b"200"]:
                return f"error: status {status[1].decode() if len(status) > 1 else 'none'}"
            return await self._follow(reader, leaves_after)
        finally:
            writer.close()

    @staticmethod
    async def _retry_after(reader: asyncio.StreamReader) -> float:
        """Return the seconds of Retry-After. Raises OSError if the header is missing."""
        while (line := await reader.readline()).strip():
            name, _, value = line.partition(b":")
            if name.lower() == b"retry-after":
                return float(value)
        raise OSError("a response with status 429 has no Retry-After header")

    async def _follow(self, reader: asyncio.StreamReader, leaves_after: int | None) -> str:
        before, pieces, finished = None, 0, False
        while line := await reader.readline():
            if line.startswith(b"data: [DONE]"):
                return "complete" if finished else "incomplete"
            if not line.startswith(b"data: "):
                continue
            data = json.loads(line[6:])
            if "error" in data:
                return "error: in the stream"
            for choice in data["choices"]:
                finished |= choice["finish_reason"] is not None
                if choice["delta"].get("content") or choice["delta"].get("reasoning_content"):
                    now, pieces = time.perf_counter(), pieces + 1
                    if before is not None:
                        self.gaps.append(1000 * (now - before))
                    before = now
            if leaves_after is not None and pieces >= leaves_after:
                return "left"
        return "incomplete"


def quantile(values: list[float], part: float) -> float:
    """Return the quantile `part` of sorted values."""
    return values[min(len(values) - 1, int(part * len(values)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--readers", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--leaving", type=float, default=0.1, help="share of streams that readers leave early")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    given = parser.parse_args()

    stolen, load_before = StolenTime(), os.getloadavg()[0]
    server = Server(given.file, ["--max-num-seqs", str(given.readers), "--cache-disk", "0", "--no-browser"])
    try:
        readers = Readers(server.port, given.leaving, given.max_tokens)
        asyncio.run(readers.run(given.readers, given.seconds))
    finally:
        server.close()
    gaps = sorted(readers.gaps)
    if not gaps:
        sys.exit(f"the streams were empty: {dict(readers.seen)}")
    figures: dict[str, Any] = {
        "model": given.file.name,
        "readers": given.readers,
        "seconds": given.seconds,
        "load_before": round(load_before, 2),
        "streams": dict(sorted(readers.seen.items())),
        "errors": sum(number for ended, number in readers.seen.items() if ended.startswith("error")),
        "incomplete": readers.seen["incomplete"],
        "gaps": len(gaps),
        "gap_ms": {name: round(quantile(gaps, part), 1) for name, part in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))},
    }
    keep(figures, stolen, given.out)


if __name__ == "__main__":
    main()
