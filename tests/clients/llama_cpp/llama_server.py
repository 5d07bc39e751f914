#!/usr/bin/env python3
"""Start `notso serve` in place of the llama-server that llama.cpp's tests expect, with translated options.

Options that affect only speed, and defaults that each request contains, are dropped. An option for an unsupported
feature ends the start, so that its test fails at once and for that reason.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence

SERVED = {"--host": "--host", "--port": "--port", "--threads": "--threads"}
"""Their option -> ours; all take a value."""

LEFT_OUT = frozenset(
    [
        "--temp",
        "--seed",
        "--hf-repo",
        "--hf-file",
        "--model",
        "--batch-size",
        "--ubatch-size",
        "--n-gpu-layers",
        "-ctk",
        "-ctv",
        "-fa",
        "--alias",
        "--n-predict",
        "--cache-ram",
        "--reasoning-format",
        "--reasoning",
        "--chat-template",
        "--chat-template-file",
    ]
)
"""Dropped options with a value. Tests always use our model and its template."""

LEFT_OUT_FLAGS = frozenset(
    [
        "--offline",
        "--cont-batching",
        "--metrics",
        "--slots",
        "--no-slots",
        "--kv-unified",
        "--swa-full",
        "--jinja",
        "--no-jinja",
        "--no-mmproj",
        "--verbose",
        "--no-cache-idle-slots",
    ]
)

SEEN = ("--ctx-size", "--parallel", "--api-key", "--cors-origins")
DEFAULT_SLOTS = 4
LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")


def options_of(given: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return (options with their values, flags). Raise ValueError for an unsupported option."""
    values, flags = {}, []
    rest = iter(given)
    for option in rest:
        if option in LEFT_OUT_FLAGS:
            flags.append(option)
        elif option in LEFT_OUT or option in SERVED or option in SEEN:
            values[option] = next(rest)
        else:
            raise ValueError(f"{option} is not offered")
    return values, flags


def ours(values: dict[str, str], flags: Sequence[str]) -> Iterator[str]:
    """Yield the options of `notso serve`. Unless `--kv-unified` is given, their `--ctx-size` is divided among the
    slots."""
    for theirs, name in SERVED.items():
        if theirs in values:
            yield from (name, values[theirs])
    if values.get("--cors-origins") == "localhost":
        for host in LOCAL_HOSTS:
            yield from ("--allow-origin", f"http://{host}:*")
    slots = int(values.get("--parallel", DEFAULT_SLOTS))
    yield from ("--max-num-seqs", str(slots))
    if "--ctx-size" in values:
        shares = 1 if "--kv-unified" in flags else slots
        yield from ("--context", str(int(values["--ctx-size"]) // shares))


def main() -> None:
    try:
        values, flags = options_of(sys.argv[1:])
    except ValueError as error:
        sys.exit(str(error))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_")}
    if "--api-key" in values:
        environment["NOTSO_API_KEY"] = values["--api-key"]
    python = environment["NOTSO_PYTHON"]
    start = "import sys; from notso.cli import main; sys.exit(main(sys.argv[1:]))"
    data = tempfile.mkdtemp(dir=environment["NOTSO_TESTS_DATA"])
    command = [python, "-c", start, "serve", "--no-browser", "--data-dir", data, "--cache-disk", "0"]
    os.execve(python, [*command, *ours(values, flags)], environment)


if __name__ == "__main__":
    main()
