"""Measure the cost of switching models under load: eight clients request one model and then the other, without a pause.

    notso synth build/one.gguf --layers 4 && notso synth build/two.gguf --layers 4 --seed 1
    python benchmarks/swap.py build/one.gguf build/two.gguf --rounds 4
    python benchmarks/swap.py build/one.gguf build/two.gguf --rounds 4 --data-limit 1500

In each round, every client requests the other model while answers of the first one are still being generated. The
results are lost and failed requests, and the time to the first token with and without a switch. `--data-limit` limits
the server's memory in MiB, so that it cannot hold both models. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from server import Server

from notso import __version__
from notso.smollm3.diagnostics.benchmark import StolenTime, describe_machine

CLIENTS = 8
ANSWER_SECONDS = 600.0


class Answer(NamedTuple):
    """Result of a request: whether it ended normally, and the seconds to its first token."""

    is_whole: bool
    first_s: float
    problem: str = ""


def ask(server: Server, model: str, number: int, tokens: int) -> Answer:
    """Request a streamed answer."""
    body = {"model": model, "prompt": f"Question {number}:", "max_tokens": tokens, "stream": True, "seed": number}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/v1/completions", json.dumps(body).encode(), headers
    )
    began, first, last = time.monotonic(), 0.0, b""
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            for line in answer:
                if line.startswith(b"data: "):
                    first, last = first or time.monotonic() - began, line.strip()
    except urllib.error.HTTPError as error:
        return Answer(False, 0.0, error.read().decode(errors="replace")[:200])
    except OSError as error:
        return Answer(False, 0.0, str(error))
    return Answer(last == b"data: [DONE]", first, last.decode(errors="replace")[:200])


def run(server: Server, names: tuple[str, str], rounds: int, tokens: int) -> dict[str, Any]:
    """Run rounds in which all clients switch to the other model while the first one still generates answers."""
    waits: dict[str, list[float]] = {"same model": [], "other model": []}
    failed: list[str] = []
    asked = 0
    with ThreadPoolExecutor(2 * CLIENTS) as pool:
        for number in range(rounds):
            here, there = names[number % 2], names[(number + 1) % 2]
            batches = {"same model": here, "other model": there}
            pending = []
            for kind, model in batches.items():
                pending += [(kind, pool.submit(ask, server, model, asked + at, tokens)) for at in range(CLIENTS)]
                asked += CLIENTS
                time.sleep(0.2)  # so that the first answers are being generated when the other requests arrive
            for kind, future in pending:
                answer = future.result()
                if answer.is_whole:
                    waits[kind].append(answer.first_s)
                else:
                    failed.append(answer.problem)
    answered = sum(map(len, waits.values()))
    told = {
        kind: {"median_s": round(statistics.median(each), 3), "most_s": round(max(each), 3)}
        for kind, each in waits.items()
        if each
    }
    return {
        "asked": asked,
        "answered": answered,
        "failed": failed,
        "lost": asked - answered - len(failed),
        "wait": told,
    }


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("one", type=Path)
    parser.add_argument("two", type=Path, help="another model file in the same folder")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--data-limit", type=int, metavar="MIB")
    options = parser.parse_args()
    stolen = StolenTime()
    server = Server(options.one, ["--context", "2048", "--cache-disk", "0", "--no-browser"], options.data_limit)
    try:
        found = run(server, (options.one.stem.lower(), options.two.stem.lower()), options.rounds, options.tokens)
        found["loaded at the end"] = [each["name"] for each in json.loads(server.get("/api/ps"))["models"]]
    finally:
        server.close()
    machine = describe_machine() | {"stolen_percent": round(stolen.percent(), 2)}
    about = {"clients": CLIENTS, "rounds": options.rounds, "tokens": options.tokens, "version": __version__}
    print(json.dumps(about | {"data_limit_mib": options.data_limit, "machine": machine} | found, indent=1))


if __name__ == "__main__":
    main()
