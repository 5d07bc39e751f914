"""What a confined child may use, and that it is gone when nobody waits for it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from notso.web.confined_child import ConfinedWorkError, Limits, confined

LIMITS = Limits(cpu_s=1, memory_bytes=512 << 20, wall_s=60, answer_bytes=1000)
PROGRAM = "from notso.web.confined_child import Limits, serve_one; import {imports}\nserve_one({work}, {limits!r})"


def run(work: str, limits: Limits = LIMITS, imports: str = "os", request: bytes = b"a" * 100_000) -> bytes:
    return asyncio.run(confined(PROGRAM.format(work=work, limits=limits, imports=imports), request, limits))


def test_it_answers_one_request() -> None:
    assert run("lambda asked: asked[:3].upper()") == b"AAA"


@pytest.mark.parametrize(
    "work",
    [
        "lambda asked: re.fullmatch(b'(a|a)*', asked[:60] + b'!')",  # CPU time, in one call
        "lambda asked: b'x' * (1 << 30)",
        "lambda asked: asked",  # longer than an answer may be
        "lambda asked: open('/etc/passwd', 'rb').read(9)",
        "lambda asked: 1 // 0",
    ],
)
def test_what_goes_over_a_limit_or_fails_has_no_answer(work: str) -> None:
    with pytest.raises(ConfinedWorkError, match="exceeded 1 s of CPU time or 512 MiB"):
        run(work, imports="os, re")


def children() -> set[str]:
    return {child for task in Path("/proc/self/task").iterdir() for child in (task / "children").read_text().split()}


def test_it_is_killed_at_the_deadline_and_when_nobody_waits() -> None:
    work, before = "lambda asked: time.sleep(1000) or b''", children()
    with pytest.raises(ConfinedWorkError, match=r"took more than 0\.01 s"):
        run(work, Limits(1, 512 << 20, 0.01, 1000), "time")

    async def leave() -> None:
        asked = asyncio.create_task(confined(PROGRAM.format(work=work, limits=LIMITS, imports="time"), b"", LIMITS))
        while not children() - before:
            await asyncio.sleep(0)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)

    asyncio.run(leave())
    assert not children() - before


def test_without_a_process_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ConfinedWorkError, match="no process can be started"):
        run("bytes")
