"""Print log records to stderr, one line each, with tracebacks only under --debug."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

from notso.cli import exit_codes, terminal
from notso.web.values.request_id import request_id


class _Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # requests must not fail if the disk with the log file is full
            self.print(record)

    def print(self, record: logging.LogRecord) -> None:
        raise NotImplementedError


class _TextHandler(_Handler):
    def print(self, record: logging.LogRecord) -> None:
        line = " ".join(record.getMessage().split())
        if (request := request_id.get()) is not None:
            line = f"[{request}] {line}"
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            line += f" ({type(error).__name__}: {' '.join(str(error).split())})"
        terminal.warn(f"notso: {line}")
        if error is not None and exit_codes.debugging():
            terminal.note(exit_codes.format_traceback(error))


class _JsonHandler(_Handler):
    def print(self, record: logging.LogRecord) -> None:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        entry: dict[str, Any] = {"time": time, "level": record.levelname.lower(), "logger": record.name}
        entry["message"] = record.getMessage()
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            entry |= {"error": type(error).__name__, "error_message": str(error)}
            if exit_codes.debugging():
                entry["traceback"] = exit_codes.format_traceback(error)
        if (request := request_id.get()) is not None:
            entry["request_id"] = request
        entry |= {name: getattr(record, name) for name in ("trace_id", "span_id") if hasattr(record, name)}
        sys.stderr.write(json.dumps(entry, ensure_ascii=True) + "\n")
        sys.stderr.flush()


def install_json() -> None:
    package_logger, root_logger = logging.getLogger("notso"), logging.getLogger()
    for handler in list(package_logger.handlers):
        if isinstance(handler, _TextHandler):
            package_logger.removeHandler(handler)
    if not any(isinstance(handler, _JsonHandler) for handler in root_logger.handlers):
        root_logger.addHandler(_JsonHandler(logging.WARNING))


def install_access_log() -> None:
    access = logging.getLogger("notso.access")
    if not access.handlers:
        is_json = any(isinstance(handler, _JsonHandler) for handler in logging.getLogger().handlers)
        access.addHandler(_JsonHandler(logging.INFO) if is_json else _TextHandler(logging.INFO))
        access.setLevel(logging.INFO)
        access.propagate = False


def install() -> None:
    """Log to stderr. Idempotent."""
    logger = logging.getLogger("notso")
    if not any(isinstance(handler, _TextHandler) for handler in logger.handlers):
        logger.addHandler(_TextHandler(logging.WARNING))
