"""The front door: one file per verb a person types. Heavy imports wait inside the verbs, so that `--help` is quick."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (default: this process's own) and give back its exit code."""
    from notso.cli import exit_codes

    try:
        from notso.cli.app import run_command_line
    except KeyboardInterrupt:  # a person who is quicker than the imports
        return exit_codes.INTERRUPTED
    return run_command_line(arguments)
