"""The log on stderr, as text lines or as JSON."""

from __future__ import annotations

import errno
import io
import json
import logging
import sys
from collections.abc import Callable, Iterator

import pytest

from notso.cli import notices


@pytest.fixture
def loggers() -> Iterator[tuple[logging.Logger, logging.Logger]]:
    """Return the package's logger and the root logger, and restore both afterwards."""
    both = logging.getLogger("notso"), logging.getLogger()
    before = [list(each.handlers) for each in both]
    yield both
    for each, handlers in zip(both, before, strict=True):
        each.handlers[:] = handlers


def test_json_log_writes_one_object_per_line(
    loggers: tuple[logging.Logger, logging.Logger], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NOTSO_DEBUG", raising=False)
    notices.install()
    notices.install_json()
    notices.install_json()
    log = logging.getLogger("notso.web.test")
    log.info("not this")
    log.warning("two\nlines of %s", "it", extra={"trace_id": "1" * 32, "span_id": "2" * 16})
    try:
        raise ValueError("wrong")
    except ValueError:
        logging.getLogger("uvicorn.error").exception("it failed")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert first["message"] == "two\nlines of it" and first["level"] == "warning" and first["time"].endswith("Z")
    assert (first["logger"], first["trace_id"], first["span_id"]) == ("notso.web.test", "1" * 32, "2" * 16)
    assert second["error"] == "ValueError" and second["error_message"] == "wrong" and "traceback" not in second
    monkeypatch.setenv("NOTSO_DEBUG", "1")
    try:
        raise ValueError("again")
    except ValueError:
        log.exception("it failed")
    assert "Traceback" in json.loads(capsys.readouterr().err)["traceback"]


def test_text_log_writes_one_line_per_record(
    loggers: tuple[logging.Logger, logging.Logger], capsys: pytest.CaptureFixture[str]
) -> None:
    loggers[0].handlers[:] = []
    notices.install()
    logging.getLogger("notso.web.test").warning("two\nlines")
    assert capsys.readouterr().err == "notso: two lines\n"


class FullDisk(io.StringIO):
    writes = 0

    def write(self, text: str, /) -> int:
        self.writes += 1
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("install", [notices.install, notices.install_json])
def test_log_on_a_full_disk_raises_no_error(
    loggers: tuple[logging.Logger, logging.Logger], monkeypatch: pytest.MonkeyPatch, install: Callable[[], None]
) -> None:
    for each in loggers:
        each.handlers[:] = []
    install()
    disk = FullDisk()
    monkeypatch.setattr(sys, "stderr", disk)
    logging.getLogger("notso.web.test").warning("lost")
    assert disk.writes == 1
