"""Pytest plugin that adapts llama.cpp's server tests to our model and machine.

- Nothing is downloaded.
- Any text matches where a test expects words of their tiny models (`match_regex`).
- Any positive number matches where a test expects prompt tokens of their tokenizer (`n_prompt`).
- Their model does not think, so chats ask ours not to (`reasoning_effort`) unless they set it themselves.
- Their model never ends an answer early, so ours is asked not to in plain completions and in cases that count the
  tokens of a chat's answer (`ignore_eos`).
- Their server takes defaults as options (`--temp`, `--seed`, `--n-predict`); here the requests contain them.
- Header names ignore case, and the response to a preflight may be 204, because it has no content.
- Their fingerprint is a build number with the prefix b; ours gets the same prefix.
- Requests name no model: their server accepts any name, ours only that of its model.
- Cases that do not apply are skipped with the reason from exclusions.json.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import openai.resources.chat.completions as openai_chat
import openai.resources.completions as openai_text
import openai.resources.responses as openai_responses
import pytest
from exclusions import NOT_APPLICABLE, reasons_of
from requests.structures import CaseInsensitiveDict

TESTS = Path(os.environ["LLAMA_SERVER_TESTS"])
EXCLUDED = os.environ.get("NOTSO_EXCLUDED") == "1"
OUR_MODEL = "notso-demo"
OK, NO_CONTENT = 200, 204


class AnyCount:
    """Equal to any positive number of tokens."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int) and other > 0

    def __hash__(self) -> int:
        return 0


def _refuse_download(*_: object, **__: object) -> None:
    raise OSError("nothing is downloaded in these tests")


counts_tokens = False
"""Whether the running case counts the tokens of an answer."""


HELD = frozenset({"grammar", "json_schema", "response_format", "ignore_eos", "tools"})
"""Fields with which an answer must end on its own."""


def _adapted(server: Any, path: str, data: dict[str, Any]) -> dict[str, Any]:
    data = {name: value for name, value in data.items() if name != "model"}
    is_chat = path.endswith("/chat/completions")
    if not is_chat and path not in ("/completion", "/completions", "/v1/completions"):
        return data
    defaults: dict[str, Any] = {"temperature": server.temperature, "seed": server.seed}
    if server.n_predict and not data.keys() & {"max_tokens", "n_predict"}:
        defaults["n_predict"] = server.n_predict
    if is_chat:
        defaults["reasoning_effort"] = "none"
    if (counts_tokens or not is_chat) and not data.keys() & HELD:
        defaults["ignore_eos"] = True
    return defaults | data


def _as_built(answer: Any) -> Any:
    if isinstance(answer, dict) and "system_fingerprint" in answer:
        answer["system_fingerprint"] = f"b{answer['system_fingerprint']}"
    return answer


def _whole_adapting(send: Callable[..., Any]) -> Callable[..., Any]:
    def sent(server: Any, method: str, path: str, data: Any = None, *rest: Any, **more: Any) -> Any:
        asked = _adapted(server, path, data) if isinstance(data, dict) else data
        answer = send(server, method, path, asked, *rest, **more)
        _as_built(answer.body)
        answer.headers = CaseInsensitiveDict(answer.headers)
        if method == "OPTIONS" and answer.status_code == NO_CONTENT:
            answer.status_code = OK
        return answer

    return sent


def _stream_adapting(send: Callable[..., Any]) -> Callable[..., Any]:
    def sent(server: Any, method: str, path: str, data: Any = None, *rest: Any, **more: Any) -> Any:
        asked = _adapted(server, path, data) if isinstance(data, dict) else data
        return map(_as_built, send(server, method, path, asked, *rest, **more))

    return sent


def _library_adapting(create: Callable[..., Any], **more: Any) -> Callable[..., Any]:
    def created(client: Any, **asked: Any) -> Any:
        answer = create(client, **more | asked | {"model": OUR_MODEL})
        if getattr(answer, "system_fingerprint", None):
            answer.system_fingerprint = f"b{answer.system_fingerprint}"
        return answer

    return created


@pytest.fixture(autouse=True)
def _counting(request: pytest.FixtureRequest) -> None:
    global counts_tokens
    params = getattr(request.node, "callspec", None)
    names = set() if params is None else set(params.params)
    counts_tokens = "n_predicted" in names


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Skip cases that do not apply, and accept any count of prompt tokens."""
    reasons = reasons_of("not_applicable", map(_name, items))
    for item in items:
        reason = reasons.get(_name(item))
        if reason is not None and not EXCLUDED:
            item.add_marker(pytest.mark.skip(reason=NOT_APPLICABLE + reason))
        if reason is None and EXCLUDED:
            item.add_marker(pytest.mark.skip(reason="it applies"))
        if hasattr(item, "callspec") and "n_prompt" in item.callspec.params:
            item.callspec.params["n_prompt"] = AnyCount()


def _name(item: Any) -> str:
    return f"{Path(item.fspath).stem}::{item.name}"


sys.path.insert(0, str(TESTS))
wget = ModuleType("wget")
wget.__dict__["download"] = _refuse_download
sys.modules["wget"] = wget

import utils  # noqa: E402

utils.match_regex = lambda regex, text: isinstance(text, str)
utils.ServerPreset.load_all = staticmethod(lambda: None)
utils.ServerProcess.make_request = _whole_adapting(utils.ServerProcess.make_request)
utils.ServerProcess.make_stream_request = _stream_adapting(utils.ServerProcess.make_stream_request)
chat = {"reasoning_effort": "none", "extra_body": {"ignore_eos": True}}
openai_chat.Completions.create = _library_adapting(openai_chat.Completions.create, **chat)  # type: ignore
text = {"extra_body": {"ignore_eos": True}}
openai_text.Completions.create = _library_adapting(openai_text.Completions.create, **text)  # type: ignore
openai_responses.Responses.create = _library_adapting(openai_responses.Responses.create, reasoning={"effort": "none"})  # type: ignore
