"""Tokens of an answer on the demo model: alternatives, versions that branch at a token, and receipts on the page."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest

from notso.smollm3 import Engine, EngineError
from notso.web.values.errors import EngineUnavailableError, QuotaError
from notso.web.values.ids import new_id

JSON = {"accept": "application/json"}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load(threads=1, context_tokens=2048)


@pytest.fixture(scope="module")
def served(engine: Engine, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Any]:
    shared = request.getfixturevalue("shared")
    settings = type(shared.shared.settings)(port=0, data_dir=tmp_path_factory.mktemp("tokens"))
    server = type(shared)(lambda: engine, settings).ready()
    server.client.post("/settings", data={"temperature": "1.3", "max_tokens": "80", "seed": "5"})
    yield server
    server.close()


def path_of(asked: Any) -> str:
    return f"/chats/{asked.chat_id}/messages/{asked.message_id}"


def trace_of(server: Any, asked: Any) -> Any:
    return server.on_loop(lambda: server.shared.store.trace("local", asked.message_id))


def test_token_alternatives_include_the_chosen_token(served: Any) -> None:
    asked = served.ask("Tell me something")
    stored = served.finished(asked)
    (run,) = trace_of(served, asked).runs
    for at in (0, 2, len(run.ids) - 1):
        told = served.client.get(f"{path_of(asked)}/tokens", params={"at": at}, headers=JSON).json()
        assert [each["id"] for each in told["tokens"]] == list(run.ids) and told["total"] == len(run.ids)
        chances = [each["probability"] for each in told["alternatives"]]
        assert chances == sorted(chances, reverse=True) and 0.5 < sum(chances) <= 1.0001
        assert run.ids[at] in {each["id"] for each in told["alternatives"]}
    assert stored.content in "".join(each["text"] for each in told["tokens"])
    page = served.client.get(f"{path_of(asked)}/tokens", params={"at": 2}, headers={"accept": "text/html"}).text
    assert "/fork" in page and 'aria-current="true"' in page
    for bad in ({"at": 10**6}, {"run": 7}, {"at": -1}):
        assert served.client.get(f"{path_of(asked)}/tokens", params=bad, headers=JSON).status_code == 400


def test_unreachable_engine_is_reported_on_pages(served: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(ids: object) -> list[bytes]:
        raise EngineUnavailableError("the engine does not respond")

    asked = served.ask("Tell me something")
    served.finished(asked)
    monkeypatch.setattr(engine, "token_bytes", fail)
    for headers in ({"accept": "text/html"}, {"HX-Request": "true"}, JSON):
        answer = served.client.get(f"{path_of(asked)}/tokens", headers=headers)
        assert answer.status_code == 503 and answer.headers["retry-after"] == "5"
        assert "the engine does not respond" in answer.text


def test_error_of_the_engine_on_a_page_is_logged(served: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = served.ask("Tell me something")
    served.finished(asked)
    failure, logger = EngineError("the engine failed"), Mock()  # the records of a real logger are limited per minute
    monkeypatch.setattr(engine, "token_bytes", Mock(side_effect=failure))
    monkeypatch.setattr("notso.web.app.logger", logger)
    assert served.client.get(f"{path_of(asked)}/tokens", headers=JSON).status_code == 500
    assert logger.error.call_args.kwargs == {"exc_info": failure}


@pytest.mark.parametrize("thinking", [True, False])
def test_fork_at_a_token_reuses_the_cached_prefix(served: Any, engine: Engine, thinking: bool) -> None:
    asked = served.ask("Tell me more", thinking=thinking)
    first = served.finished(asked)
    (run,) = trace_of(served, asked).runs
    for at in (1, len(run.ids) // 2):
        told = served.client.get(f"{path_of(asked)}/tokens", params={"at": at}, headers=JSON).json()
        other = next(each["id"] for each in told["alternatives"] if each["id"] != run.ids[at])
        before = engine.stats()
        answer = served.client.post(f"{path_of(asked)}/fork", data={"key": new_id(), "at": at, "token": other})
        assert answer.status_code == 303, answer.text
        version = served.last(asked.chat_id)
        stored = served.finished(version)
        (forked,) = trace_of(served, version).runs
        assert stored.state == "done" and forked.ids[: at + 1] == (*run.ids[:at], other)
        assert stored.parent_id == first.parent_id and stored.id != first.id
        after = engine.stats()
        read = after.prompt_tokens_total - before.prompt_tokens_total + at
        assert read - (after.cached_tokens_total - before.cached_tokens_total) <= 128, "the rest came from the cache"
    typed = served.client.post(f"{path_of(asked)}/fork", data={"key": new_id(), "at": 1, "text": " In short,"})
    assert typed.status_code == 303
    stored = served.finished(version := served.last(asked.chat_id))
    (forked,) = trace_of(served, version).runs
    assert engine.detokenize(forked.ids[1:9]).startswith(" In short,")
    assert " In short," in stored.reasoning + stored.content


def test_tokens_and_receipt_of_a_version_with_its_own_settings(served: Any) -> None:
    """A version keeps the settings that it was generated with, including the chat's instructions at that time."""
    asked = served.ask("Tell me again")
    served.finished(asked)
    assert served.client.post(f"{path_of(asked)}/regenerate", data={"key": new_id(), "temperature": "0.7"}).is_redirect
    served.finished(version := served.last(asked.chat_id))
    served.client.post(f"/chats/{asked.chat_id}/settings", data={"system_prompt": "Answer in one word."})
    (run,) = trace_of(served, version).runs
    told = served.client.get(f"{path_of(version)}/tokens", params={"at": 2}, headers=JSON)
    assert told.status_code == 200, told.text
    assert run.ids[2] in {each["id"] for each in told.json()["alternatives"]}
    receipt = served.client.get(f"{path_of(version)}/receipt")
    assert receipt.status_code == 200 and "one word" not in receipt.text


def test_fork_beyond_the_quota_is_refused_before_it_is_stored(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Quotas:
        def has_quota(self, owner: str) -> bool:
            return True

        async def reserve(self, owner: str, uses: Any) -> Any:
            raise QuotaError("used up", retry_after_seconds=60)

    asked = served.ask("Tell me less")
    served.finished(asked)
    monkeypatch.setattr(served.shared.requests, "quotas", Quotas())
    refused = served.client.post(f"{path_of(asked)}/fork", data={"key": new_id(), "at": "1", "text": "x"})
    assert refused.status_code == 429 and "used up" in refused.text
    assert served.last(asked.chat_id).message_id == asked.message_id, "no version was stored"


def test_invalid_forks_are_rejected_and_edited_answer_has_no_tokens(served: Any) -> None:
    asked = served.ask("Hello")
    served.finished(asked)
    places = ("x", "-1", "100000", "9" * 30, "1.0", "\u0661")
    odd = (
        {"at": "1"},
        {"at": "1", "token": "5", "text": "x"},
        {"token": "5"},
        *({"at": at, "token": "5"} for at in places),
    )
    for fields in (
        *odd,
        {"at": "1", "token": "5", "run": "7"},
        {"at": "1", "token": "-5"},
        {"at": "1", "text": "x" * 1001},
    ):
        answer = served.client.post(f"{path_of(asked)}/fork", data={"key": new_id(), **fields})
        assert answer.status_code == 400, fields
    gone = served.client.post(f"{path_of(asked)}/fork", data={"key": new_id(), "at": "1", "token": "99999999"})
    assert gone.status_code == 409
    for path in (f"/chats/{new_id()}/messages/{asked.message_id}", f"/chats/{asked.chat_id}/messages/{new_id()}"):
        answer = served.client.post(f"{path}/fork", data={"key": new_id(), "at": "1", "token": "5"})
        assert answer.status_code == 404, "messages of other chats and users are not accessible"
    served.client.post(f"{path_of(asked)}/edit", data={"text": "mine"})
    assert served.client.get(f"{path_of(asked)}/tokens").status_code == 409
    assert served.client.get(f"{path_of(asked)}/receipt").status_code == 409


def test_downloaded_open_and_sealed_receipts_are_valid(served: Any, engine: Engine) -> None:
    asked = served.ask("Tell me a secret")
    served.finished(asked)
    answer = served.client.get(f"{path_of(asked)}/receipt")
    assert "attachment" in answer.headers["content-disposition"]
    assert engine.check_receipt(answer.json()).problem == ""
    sealed = served.client.get(f"{path_of(asked)}/receipt?form=sealed").json()
    assert engine.check_receipt(sealed, answer.json()).problem == "" and "secret" not in json.dumps(sealed)
    (run,) = trace_of(served, asked).runs
    assert answer.json()["answer"]["ids"] == list(run.ids)


def test_tokens_receipt_and_fork_of_a_running_answer_return_409(served: Any, engine: Engine) -> None:
    step, may_go_on = engine._core._step, threading.Event()

    def waiting() -> None:
        if any(each.output.tokens >= 3 for each in engine._core._requests.values()):
            assert may_go_on.wait(60)
        step()

    engine._core._step = waiting  # type: ignore[method-assign]
    try:
        asked = served.ask("Hello again")
        for path in ("tokens", "receipt"):
            assert served.client.get(f"{path_of(asked)}/{path}").status_code == 409
        answer = served.client.post(f"{path_of(asked)}/fork", data={"key": new_id(), "at": "1", "token": "5"})
        assert answer.status_code == 409
    finally:
        may_go_on.set()
        engine._core._step = step  # type: ignore[method-assign]
    assert served.finished(asked).state == "done"
