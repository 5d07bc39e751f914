"""Command-line interface: one module per command. Commands import slow modules only when run, to keep `--help` fast."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (default: sys.argv) and return its exit code."""
    from notso.cli import exit_codes

    try:
        from notso.cli.app import run_command_line
    except KeyboardInterrupt:  # Ctrl-C during the imports
        return exit_codes.INTERRUPTED
    return run_command_line(arguments)
