"""Sign-in by a plugin: if the plugin fails, access is denied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from plugins.installed_plugins import install
from scripted_engine import ScriptedEngine

from notso.plugins.process import PluginProcess, Plugins
from notso.web.sign_in.methods import PluginSignIn
from notso.web.values.errors import SettingsError
from notso.web.values.ids import new_id

KEY = "correct horse battery staple"


@pytest.fixture
def server(start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    install(tmp_path, monkeypatch)
    plugins = Plugins(("doorman",))
    running = start(ScriptedEngine(), plugins=plugins, sign_in_plugin="doorman", api_key=KEY).ready()
    plugins.wait()
    yield running
    plugins.close()


def test_plugin_user_has_own_chats(server: Any) -> None:
    client, badge = server.client, {"X-Badge": "wave"}
    assert client.get("/", headers={"Accept": "text/html"}).status_code == 303
    assert client.get("/v1/models").status_code == 401
    assert client.get("/v1/models", headers=badge).status_code == 200
    assert client.get("/v1/models", headers={"X-Badge": "odd"}).status_code == 401
    for two in (("wave", "odd"), ("odd", "wave")):
        assert client.get("/v1/models", headers=[("X-Badge", each) for each in two]).status_code == 401
    made = client.post("/chats", data={"text": "Hello", "key": new_id()}, headers=badge)
    assert made.status_code == 303
    where = made.headers["location"]
    assert client.get(where, headers=badge).status_code == 200
    key = {"Authorization": f"Bearer {KEY}"}
    assert client.get(where, headers=key).status_code == 404
    assert server.on_loop(lambda: server.shared.store.chats("doorman:waver"))[0].id == where.rpartition("/")[2]


def test_hanging_plugin_denies_access_but_server_key_still_works(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("notso.web.sign_in.methods.SIGN_IN_SECONDS", 0.3)
    assert server.client.get("/v1/models", headers={"X-Badge": "hang"}).status_code == 401
    assert server.shared.plugins.find("doorman").failure == "signing in took longer than 0.3 s"
    assert server.client.get("/v1/models", headers={"X-Badge": "wave"}).status_code == 401
    assert server.client.get("/v1/models", headers={"x-api-key": KEY}).status_code == 200


@pytest.mark.parametrize("name", ["key", "proxy", "oidc"])
def test_reserved_plugin_name_is_rejected_for_sign_in(name: str) -> None:
    with pytest.raises(SettingsError, match=f"a plugin named {name} cannot sign in users"):
        PluginSignIn(PluginProcess(name))


def test_sign_in_plugin_must_be_enabled(start: Callable[..., Any]) -> None:
    with pytest.raises(SettingsError, match="add --plugin doorman"):
        start(ScriptedEngine(), sign_in_plugin="doorman")
