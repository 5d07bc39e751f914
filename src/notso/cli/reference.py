"""The documentation's command reference, made of `--help`: `python -m notso.cli.reference > docs/commands.md`."""

from __future__ import annotations

import contextlib
import io
import os
from unittest import mock

from notso.cli import exit_codes
from notso.cli.app import VERBS, run_command_line

_EXIT_CODES = {
    exit_codes.DONE: "done",
    exit_codes.FAILED: "failed for another reason than those below",
    exit_codes.WRONG_USAGE: "wrong usage: an unknown option, a value out of range, an unknown kernel family",
    exit_codes.BAD_MODEL: "the model file is missing, damaged or of a kind that is not supported",
    exit_codes.NO_ROOM: "not enough memory or disk",
    exit_codes.BAD_DATA_DIRECTORY: "the data directory is in use, or was made by a newer release",
    exit_codes.BIND_REFUSED: "the address is in use, or listening on it was refused",
    exit_codes.NETWORK: "the network is needed, or a download failed",
    exit_codes.INTERRUPTED: "interrupted by Ctrl-C",
}


def reference() -> str:
    """The page, in Markdown."""
    parts = ["# Commands", _INTRODUCTION, _fenced(_help())]
    for verb in VERBS:
        parts += [f"## notso {verb}", _fenced(_help(verb))]
    rows = "\n".join(f"| {code} | {meaning} |" for code, meaning in _EXIT_CODES.items())
    parts += ["## Exit codes", f"| code | meaning |\n| --- | --- |\n{rows}"]
    return "\n\n".join(parts) + "\n"


_INTRODUCTION = """\
Made from `--help` by `python -m notso.cli.reference > docs/commands.md`; a test holds the two together.

An option beats its environment variable, which beats the default. The result goes to stdout, everything else to
stderr. `NO_COLOR`, `TERM=dumb` and `--plain` (or `NOTSO_PLAIN=1`) take colour and bars away, a pipe does too. A
failure is one line on stderr that says what and how to mend it; `--debug` (or `NOTSO_DEBUG=1`) adds the traceback.

`NOTSO_KERNELS=generic|avx2|avx512|amx|neon|neon_i8mm` forces a kernel family, `NOTSO_ATTENTION=vectors|tiles` how
prompts attend on AMX. What the CPU lacks is refused with the choices."""


def _help(*verb: str) -> str:
    shown = io.StringIO()
    with mock.patch.dict(os.environ, {"COLUMNS": "100"}), contextlib.redirect_stdout(shown):
        run_command_line([*verb, "--help"])
    return shown.getvalue().strip("\n")


def _fenced(text: str) -> str:
    return f"```text\n{text}\n```"


if __name__ == "__main__":
    print(reference(), end="")
