"""What the floors below log, as one line each on stderr: warnings always, tracebacks only for who asked for them."""

from __future__ import annotations

import logging

from notso.cli import exit_codes, terminal


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        line = " ".join(record.getMessage().split())
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            line += f" ({type(error).__name__}: {' '.join(str(error).split())})"
        terminal.warn(f"notso: {line}")
        if error is not None and exit_codes.debugging():
            terminal.note(exit_codes.details(error))


def install() -> None:
    """Send the package's own log there; done again, it changes nothing."""
    logger = logging.getLogger("notso")
    if not any(isinstance(handler, _Lines) for handler in logger.handlers):
        logger.addHandler(_Lines(logging.WARNING))
