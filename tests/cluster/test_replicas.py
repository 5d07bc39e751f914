"""Two replicas under Ray Serve: related requests reach the same replica, and no acknowledged data is lost or duplicated
when one is killed or all are replaced in turn."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chaos.cluster_crowd import COOKIE, Crowd
from chaos.test_cluster import Inspector, wait_for_some
from cluster.ray_cluster import HAS_RAY, NO_RAY, RayCluster

pytestmark = [
    pytest.mark.long("ray"),
    pytest.mark.timeout(600),
    pytest.mark.skipif(not HAS_RAY, reason=NO_RAY),
]

CHATS, READERS = 4, 2  # each reader of a chat has one stream; a user may have eight
MOST_KILLS = 20
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "affinity.py"
WORDS = "a *question* of `several` words,\n\nand a second paragraph. " * 2


# If a replica has not reported its load for ten seconds, Serve asks for it before the next request, and sends the
# request to another replica if there is no response in this time. The default, 0.1 s, is too short on a busy machine.
PATIENT = dict.fromkeys(
    ("RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S", "RAY_SERVE_MAX_QUEUE_LENGTH_RESPONSE_DEADLINE_S"), "30"
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    cluster = RayCluster(tmp_path_factory.mktemp("ray"), **PATIENT)
    yield cluster
    cluster.close()


async def under_load(cluster: RayCluster, words: str, attack: Callable[[Crowd], None]) -> Crowd:
    """Run `attack` in a thread while browsers ask and read; return when all answers have ended."""
    crowd, inspector = Crowd(cluster.port), Inspector(cluster.database)

    async def chat(number: int) -> None:
        COOKIE.set(f"notso_replica={number:016x}")
        await crowd.chat(number, READERS, f"{words} {WORDS}")

    chats = [asyncio.create_task(chat(number)) for number in range(CHATS)]
    await asyncio.to_thread(wait_for_some, crowd, CHATS)
    try:
        await asyncio.to_thread(attack, crowd)
    finally:
        crowd.over = True
        await asyncio.gather(*chats)
    while await asyncio.to_thread(inspector.active):
        await asyncio.sleep(0.1)
    wrong = inspector.wrong(crowd)
    inspector.close()
    print(f"{len(crowd.asked)} questions, {dict(crowd.statuses)}, {dict(crowd.ends)}, {crowd.broken} connections cut")
    assert not wrong and crowd.shown and crowd.ends["done"]
    return crowd


def test_cluster_serves_pages_health_and_metrics(cluster: RayCluster) -> None:
    assert cluster.get("/health").json()["status"] == "ok"
    assert "notso_num_requests_running" in cluster.get("/metrics").text
    page = cluster.get("/", accept="text/html")
    assert page.status_code == 200 and page.headers["set-cookie"].startswith("notso_replica=")
    assert len(cluster.replicas()) == 2 and cluster.status()["replicas"] == {"RUNNING": 2}


def test_affinity_lets_each_turn_reuse_the_cache(cluster: RayCluster) -> None:
    """With affinity each turn finds the previous one in the cache, as on one machine; without it, many do not."""

    def found(*options: str) -> tuple[int, int]:
        command = [sys.executable, str(BENCHMARK), cluster.url, "--conversations", "12", "--turns", "5", "--json"]
        told = json.loads(subprocess.run([*command, *options], stdout=subprocess.PIPE, check=True).stdout)
        print(told)
        return told["of_which_found_it"], told["turns_after_another"]

    assert found() == (48, 48)
    assert found("--scattered", "--name", "scattered")[0] < 48


def test_killed_replica_loses_no_acknowledged_data(cluster: RayCluster) -> None:
    def kill(crowd: Crowd) -> None:
        for _ in range(MOST_KILLS):
            victim = cluster.kill()
            cluster.wait_for_replicas(2, without=victim)
            wait_for_some(crowd, CHATS)
            if crowd.resumed:  # the killed replica had a reader
                return

    crowd = asyncio.run(under_load(cluster, "killed", kill))
    assert crowd.broken and crowd.resumed
    print("streams resumed after", *(f"{seconds:.1f}" for seconds in sorted(crowd.resumed)), "s")


def test_rolling_update_causes_no_server_errors(cluster: RayCluster) -> None:
    before = set(cluster.replicas())

    def update(crowd: Crowd) -> None:
        began = time.monotonic()
        cluster.update("another")
        print(f"updated in {time.monotonic() - began:.0f} s")
        wait_for_some(crowd, CHATS)

    crowd = asyncio.run(under_load(cluster, "updated", update))
    after = set(cluster.replicas())
    assert len(after) == 2 and not before & after
    assert not [status for status in crowd.statuses if status >= 500]
