"""More connections than the server can hold: ordinary visitors still get through."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable

from chaos.ledger import LONG, Ledger
from chaos.test_unread import Crowd
from chaos.victim import Victim, Witness

FEW_DESCRIPTORS = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({0}, {0}))
"""


def test_pages_respond_during_connection_flood(victim: Callable[..., Victim], ledger: Ledger) -> None:
    size = 3000 if LONG else 150
    limit = 512 if LONG else 128
    server = victim(FEW_DESCRIPTORS.format(limit))
    with Witness(server) as witness, Crowd(server, size, pause_seconds=0.001) as crowd:
        crowd.wait_for_drops(3 * size if LONG else size)
        if LONG:
            time.sleep(60)
        visits = len(witness.page.milliseconds)
        _wait(lambda: len(witness.page.milliseconds) + witness.page.failed >= visits + 5)
    ledger.note(
        "clients",
        "connections that send nothing, more than the server accepts",
        f"{crowd.opened} connections, {size} at a time, at most 1,000 new ones a second, with a limit of {limit}"
        " descriptors",
        witness.page.failed + witness.livez.failed + (server.process.poll() is not None),
        witness.figures | {"dropped": crowd.dropped, "descriptors": witness.descriptors_peak},
    )


def test_server_survives_exhausted_file_descriptors(victim: Callable[..., Victim], ledger: Ledger) -> None:
    """Another cause has used up all descriptors except a few, so the server's own reserve is not enough."""
    size = 400 if LONG else 40
    server = victim()
    with Witness(server) as witness:
        _, hard = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (server.descriptors() + 20, hard))
        with Crowd(server, size, pause_seconds=0.001) as crowd:
            crowd.wait_for_drops(size)
            if LONG:
                time.sleep(60)
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (hard, hard))
        served = len(witness.page.milliseconds)
        _wait(lambda: len(witness.page.milliseconds) > served + 5)
    assert server.log.read_text().count("cannot accept connections") <= 3
    ledger.note(
        "clients",
        "no descriptors left to accept connections",
        f"{crowd.opened} connections, {size} at a time, at most 1,000 new ones a second, 20 descriptors left",
        witness.livez.failed + (server.process.poll() is not None),
        witness.figures | {"dropped": crowd.dropped},
    )


def _wait(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.05)
