"""Tokenizing, detokenizing, the rendered prompt, and the server's description of itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from scripted_engine import ScriptedEngine, say

from notso.smollm3 import Engine

Start = Callable[..., Any]
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A server with the demo model."""
    shared = request.getfixturevalue("shared")
    settings = type(shared.shared.settings)(port=0, data_dir=tmp_path_factory.mktemp("tokens"))
    server = type(shared)(lambda: Engine.load(threads=1), settings)
    yield server.ready()
    server.close()


def ask(server: Any, path: str, **body: Any) -> Any:
    return server.client.post(path, json=body)


def refused(server: Any, path: str, **body: Any) -> tuple[int, str, str]:
    answer = ask(server, path, **body)
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


@pytest.mark.parametrize("text", ["Hello", "", "é😀\u2028\r\n\t", "<|im_end|><think>x</think><tool_call>", "a" * 5000])
def test_detokenize_reverses_tokenize(served: Any, text: str) -> None:
    tokens = ask(served, "/tokenize", content=text).json()["tokens"]
    back = ask(served, "/detokenize", tokens=tokens, model="smollm3")
    assert back.json() == {"content": text, "prompt": text} and "x-notso-ignored" not in back.headers


def test_control_tokens_are_parsed_only_with_parse_special(served: Any) -> None:
    plain = ask(served, "/tokenize", content="<|im_end|>").json()["tokens"]
    special = ask(served, "/tokenize", content="<|im_end|>", parse_special=True).json()["tokens"]
    assert len(plain) > 3 and len(special) == 1 and special[0] not in plain
    assert ask(served, "/detokenize", tokens=special).json()["content"] == "<|im_end|>"


def test_tokenizer_info_and_tokenize_follow_vllm_format(served: Any) -> None:
    """lm-evaluation-harness requests this first; without an answer it asks for the tokenizer's files."""
    info = served.client.get("/tokenizer_info").json()
    assert info == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "model_max_length": 4096,
    }
    asked: dict[str, Any] = {"prompt": "Hello<|im_end|>", "add_special_tokens": False}
    told = ask(served, "/tokenize", **asked).json()
    assert told == {"tokens": told["tokens"], "count": len(told["tokens"]), "max_model_len": 4096}
    assert told["tokens"] == ask(served, "/tokenize", content="Hello<|im_end|>", parse_special=True).json()["tokens"]
    plain = ask(served, "/tokenize", content="Hello<|im_end|>").json()["tokens"]
    assert ask(served, "/tokenize", **asked, parse_special=False).json()["tokens"] == plain != told["tokens"]
    assert ask(served, "/tokenize", **asked | {"add_special_tokens": True}).json() == told


def test_with_pieces_returns_text_of_each_token(served: Any) -> None:
    pieces = ask(served, "/tokenize", content="Hello you", with_pieces=True).json()["tokens"]
    assert "".join(piece["piece"] for piece in pieces) == "Hello you"
    assert [piece["id"] for piece in pieces] == ask(served, "/tokenize", content="Hello you").json()["tokens"]


def test_pieces_that_are_not_whole_characters_are_lists_of_bytes(served: Any) -> None:
    text = "a\ufffd😀🫠"
    told = ask(served, "/tokenize", content=text, with_pieces=True, return_token_strs=True).json()
    pieces = [each["piece"] for each in told["tokens"]]
    read = [each.encode() if isinstance(each, str) else bytes(each) for each in pieces]
    assert b"".join(read) == text.encode() and pieces[0] == "a" and any(isinstance(each, list) for each in pieces)
    assert told["token_strs"] == [each.decode("utf-8", "replace") for each in read]
    for each in pieces:
        if isinstance(each, list):
            with pytest.raises(UnicodeDecodeError):
                bytes(each).decode()


def test_apply_template_matches_chat_completion_prompt(served: Any) -> None:
    for extra in ({}, {"reasoning_effort": "none"}, {"tools": [{"type": "function", "function": {"name": "add"}}]}):
        shown = ask(served, "/apply-template", messages=HELLO, **extra).json()
        read = ask(served, "/v1/chat/completions", messages=HELLO, max_tokens=1, **extra).json()
        assert shown["n_tokens"] == read["usage"]["prompt_tokens"]
        assert "Hello" in shown["prompt"] and ("/no_think" in shown["prompt"]) == (
            extra.get("reasoning_effort") == "none"
        )
    assert "add" in shown["prompt"]


REFUSED = [
    ("/tokenize", {"content": 5}, "invalid_value", "content"),
    ("/tokenize", {}, "invalid_value", "content"),
    ("/tokenize", {"content": "x", "prompt": "x"}, "invalid_value", "content"),
    ("/tokenize", {"content": "x", "parse_special": 1}, "invalid_value", "parse_special"),
    ("/detokenize", {"tokens": [1, True]}, "invalid_value", "tokens.1"),
    ("/detokenize", {"tokens": [1, -1]}, "invalid_value", "tokens"),
    ("/detokenize", {"tokens": [10**6]}, "invalid_value", "tokens"),
    ("/detokenize", {"tokens": [2**64 - 1]}, "invalid_value", "tokens"),
    ("/detokenize", {"tokens": "1"}, "invalid_value", "tokens"),
    ("/apply-template", {"messages": []}, "empty_prompt", "messages"),
    ("/apply-template", {"messages": [*HELLO, {"role": "assistant", "content": "Hi"}]}, "invalid_value", "messages"),
    ("/apply-template", {"messages": HELLO, "functions": [1]}, "unsupported_parameter", "functions"),
]


@pytest.mark.parametrize(("path", "body", "code", "param"), REFUSED, ids=lambda value: str(value)[:30])
def test_invalid_request_error_names_field(served: Any, path: str, body: dict[str, Any], code: str, param: str) -> None:
    assert refused(served, path, **body) == (400, code, param)


def test_long_text_is_tokenized(served: Any) -> None:
    answer = ask(served, "/tokenize", content="word " * 200_000)
    assert answer.status_code == 200 and len(answer.json()["tokens"]) >= 200_000


def test_props_and_slots_describe_server(served: Any) -> None:
    facts = served.client.get("/props").json()
    assert facts["model_alias"] == "notso-demo" and facts["default_generation_settings"]["n_ctx"] == 4096
    assert facts["default_generation_settings"]["params"]["temperature"] == 0.6
    assert len(served.client.get("/slots").json()) == facts["total_slots"] == 16


def test_slots_report_busy_without_content(start: Start) -> None:
    engine = ScriptedEngine(lambda messages, thinking: say("word " * 2000), pace_seconds=0.02, slots=3)
    server = start(engine).ready()
    body = {"messages": [{"role": "user", "content": "secret"}], "stream": True}
    with server.client.stream("POST", "/v1/chat/completions", json=body):
        server.wait(lambda: engine.stats().running == 1)
        answer = server.client.get("/slots")
    assert [place["is_processing"] for place in answer.json()] == [True, False, False]
    assert "secret" not in answer.text and "word" not in answer.text


def test_errors_outside_v1_are_json(served: Any) -> None:
    for answer in (
        served.client.put("/tokenize"),
        served.client.post("/tokenize", content=b"{", headers={"Content-Type": "application/json"}),
        served.client.post("/infill"),
        served.client.post("/detokenize", content=b"[" * 70, headers={"Content-Type": "application/json"}),
    ):
        assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
        assert answer.headers["x-request-id"]


def test_llama_cpp_health_props_and_token_count_are_served(served: Any) -> None:
    assert served.client.get("/v1/health").json() == served.client.get("/health").json()
    facts = served.client.get("/props").json()
    assert facts["model_path"].endswith(".gguf") and "/" not in facts["model_path"]
    assert facts["default_generation_settings"]["params"]["repeat_penalty"] == 1
    for path in ("/chat/completions/input_tokens", "/v1/chat/completions/input_tokens"):
        counted = ask(served, path, messages=HELLO).json()["input_tokens"]
        assert counted == ask(served, "/apply-template", messages=HELLO).json()["n_tokens"]


def test_add_special_adds_no_bos_token(served: Any) -> None:
    plain, special = (ask(served, "/tokenize", content="Hello", add_special=each).json() for each in (False, True))
    assert plain == special


def test_metrics_include_llama_cpp_counters(served: Any) -> None:
    answer = ask(served, "/completion", prompt="Numbers", n_predict=3, ignore_eos=True).json()["timings"]
    page = served.client.get("/metrics")
    told = dict(re.findall(r"^llamacpp:(\w+) ([0-9.e+-]+)$", page.text, re.MULTILINE))
    assert float(told["tokens_predicted_total"]) >= answer["predicted_n"] == 3
    assert float(told["prompt_tokens_total"]) >= answer["prompt_n"] > 0
    assert int(page.headers["Process-Start-Time-Unix"]) > 0
