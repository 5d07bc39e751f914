"""Keys, their limits and their usage are shared by all servers over one database."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from scripted_engine import ScriptedEngine
from valkey_server import ValkeyServer

from notso.web.sign_in.issued_keys import KeyManager, owner_of_key
from notso.web.store.opening import create_access_store
from notso.web.values.sign_in import SignInSettings

BODY = {"messages": [{"role": "user", "content": "Hi"}]}
MANY = SignInSettings(require_key=True)


@pytest.fixture
def book(database: str, tmp_path: Any) -> KeyManager:
    """Open the key book as `notso keys` does with DATABASE_URL."""
    return KeyManager(lambda: create_access_store(tmp_path, database))


@pytest.fixture
def servers(start: Callable[..., Any], database: str, tmp_path: Any) -> Callable[..., list[Any]]:
    def begin(many: int, **settings: Any) -> list[Any]:
        folders = (tmp_path / f"data {number}" for number in range(many))
        begun = [
            start(ScriptedEngine(), data_dir=each, database_url=database, sign_in=MANY, **settings) for each in folders
        ]
        return [each.ready() for each in begun]

    return begin


def asked(server: Any, key: str) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    answer: httpx.Response = server.client.post("/v1/chat/completions", json=BODY, headers=headers)
    return answer


def test_added_and_revoked_keys_apply_on_all_servers(servers: Callable[..., list[Any]], book: KeyManager) -> None:
    both = servers(2)
    secret, key = book.add("ann")
    assert [asked(each, secret).status_code for each in both] == [200, 200]
    browser = httpx.Client(base_url=both[1].address, timeout=60)
    assert browser.post("/login", data={"api_key": secret}).status_code == 303 and browser.get("/").status_code == 200
    for each in both:
        each.on_loop(each.shared.accounts.flush)
    today = both[0].shared.accounts.today()
    (row,) = both[1].on_loop(lambda: both[1].shared.accounts.store.usage(today, today))
    assert row.owner == owner_of_key(key.id) and row.used.requests == 2
    book.revoke("ann")
    assert [asked(each, secret).status_code for each in both] == [401, 401] and browser.get("/").status_code == 401
    log = both[0].on_loop(lambda: both[0].shared.accounts.store.audit(9))
    assert {"added the key " + key.id, "revoked the key " + key.id, "signed in"} <= {entry.action for entry in log}


def test_quota_includes_usage_on_other_servers(servers: Callable[..., list[Any]], book: KeyManager) -> None:
    first, second = servers(2)
    (secret, key), (other, another) = book.add("ann", tokens_per_day=25), book.add("bob", requests_per_day=1)
    assert asked(first, other).status_code == asked(first, secret).status_code == 200
    for each in (key, another):
        owner = owner_of_key(each.id)
        second.wait(lambda owner=owner: second.on_loop(lambda: second.shared.accounts.used_today(owner)).tokens > 0)
    refused = asked(second, secret)
    assert refused.status_code == 429 and "of 25)" in refused.json()["error"]["message"]
    assert "(1 of 1)" in asked(second, other).json()["error"]["message"]


def test_per_minute_limit_of_key_is_shared_by_servers(
    servers: Callable[..., list[Any]], book: KeyManager, valkey: ValkeyServer
) -> None:
    three = servers(3, valkey_url=valkey.url)
    secret, other = book.add("ann", requests_per_minute=60)[0], book.add("bob", requests_per_minute=60)[0]
    told = [asked(three[number % 3], secret).status_code for number in range(66)]
    assert told == [200] * 60 + [429] * 6
    assert 1 <= int(asked(three[2], secret).headers["retry-after"]) <= 60
    assert asked(three[0], other).status_code == 200
    valkey.stop()
    assert [asked(each, secret).status_code for each in three] == [200] * 3, "without Valkey each replica counts alone"
