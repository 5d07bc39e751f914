"""kill -9 of all replicas under Ray Serve in the middle of an answer: a replica that Ray restarts resumes it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from cluster.ray_cluster import HAS_RAY, NO_RAY, PATIENCE_SECONDS, RayCluster

from notso.web.values.ids import new_id

pytestmark = [
    pytest.mark.long("ray"),
    pytest.mark.timeout(0),
    pytest.mark.skipif(not HAS_RAY, reason=NO_RAY),
    pytest.mark.skipif(
        os.environ.get("CHAOS") != "long", reason="kills replicas for minutes: CHAOS=long make test-ray"
    ),
]

ANSWERS = int(os.environ.get("KILLED_ANSWERS", 3))
# Python imports this at startup. It adds 250 ms to each engine step, so that a kill hits the middle of an answer:
# a short one has twenty tokens, and tokens are stored once a second.
PACED = """
import importlib.util, sys, time

class Paced:
    def find_spec(self, name, path=None, target=None):
        if name == "notso.smollm3.engine.engine_core":
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                step = module.EngineCore._step
                module.EngineCore._step = lambda self: (time.sleep(0.25), step(self))[1]

            spec.loader.exec_module = exec_module
            return spec
        return None

sys.meta_path.insert(0, Paced())
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    folder = tmp_path_factory.mktemp("ray")
    (folder / "paced").mkdir()
    (folder / "paced" / "sitecustomize.py").write_text(PACED)
    cluster = RayCluster(folder, PYTHONPATH=str(folder / "paced"))
    yield cluster
    cluster.close()


class Answers:
    """Asks questions and reads the stored answers."""

    def __init__(self, cluster: RayCluster) -> None:
        import psycopg

        self._database = psycopg.connect(cluster.database, autocommit=True)
        self._client = httpx.Client(base_url=cluster.url, timeout=60)

    def ask(self, number: int) -> str:
        fields = {"seed": str(number), "temperature": "1.5", "max_tokens": "120"}
        assert self._client.post("/settings", data=fields).status_code in (200, 303)
        question = f"Hello, I am number {number}. Who are you?"
        answer = self._client.post("/chats", data={"text": question, "key": new_id(), "thinking": "on"})
        assert answer.status_code == 303, answer.text
        return answer.headers["location"].rpartition("/")[2]

    def stored(self, chat: str) -> tuple[str, tuple[Any, ...], int, int]:
        """Return state, texts, number of tokens, and how often the answer was resumed."""
        sql = "SELECT state, content, reasoning, trace, resumes FROM notso.messages JOIN notso.answer_traces"
        sql += " ON message_id = id WHERE chat_id = %s AND role = 'assistant'"
        state, content, reasoning, trace, resumes = self._database.execute(sql, (chat,)).fetchone()
        return state, (content, reasoning), sum(len(run["ids"]) for run in json.loads(trace)["runs"]), resumes

    def wait(self, chat: str, tokens: int = 1 << 30) -> tuple[str, tuple[Any, ...], int, int]:
        """Wait until this many tokens are stored or the answer has ended."""
        # generous, because Ray's own processes compete for a busy machine
        deadline = time.monotonic() + 4 * PATIENCE_SECONDS
        while (found := self.stored(chat))[0] in ("queued", "running") and found[2] < tokens:
            assert time.monotonic() < deadline, found
            time.sleep(0.02)
        return found


def test_answer_resumes_after_all_replicas_are_killed(cluster: RayCluster) -> None:
    answers, differing, taken_up, seconds = Answers(cluster), list[str](), 0, 0.0
    for number in range(ANSWERS):
        chat = answers.ask(number)
        answers.wait(chat, tokens=2 + number % 7)
        killed = cluster.replicas()
        for process in killed:
            os.kill(process, signal.SIGKILL)
        began = time.monotonic()
        state, text, _, resumes = answers.wait(chat)
        seconds += time.monotonic() - began
        taken_up += resumes > 0
        cluster.wait_for_replicas(2, without=killed[0])
        undisturbed = answers.ask(number)
        if (state, text) != (expected := answers.wait(undisturbed)[:2]):
            differing.append(f"{number}: {state} {text} for {expected}")
        print(f"answer {number}: resumed {resumes} times, {len(differing)} differ so far", flush=True)
    print(f"{taken_up} of {ANSWERS} answers were resumed, {seconds / ANSWERS:.1f} s from the kill to the end")
    assert not differing and taken_up > ANSWERS / 2
