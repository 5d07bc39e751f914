"""Plain completions: OpenAI's client with the demo model, and plain HTTP with a scripted engine."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import openai
import pytest
from scripted_engine import ScriptedEngine, say

from notso.smollm3 import Engine, EngineError, Event, Message
from notso.web.api.completions.fields import parse_text_request
from notso.web.values.errors import Problem

Start = Callable[..., Any]
URL = "/v1/completions"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A server with the demo model."""
    shared = request.getfixturevalue("shared")
    settings = type(shared.shared.settings)(port=0, data_dir=tmp_path_factory.mktemp("text"))
    server = type(shared)(lambda: Engine.load(threads=1), settings)
    yield server.ready()
    server.close()


def client_of(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)


def tricky(messages: Sequence[Message], thinking: bool) -> list[Event]:
    return say('one\n\ndata: {"forged": true}\r\nevent: error\u2028\x85two \u00e9\U0001f600 [DONE]\n\n', piece=3)


def test_openai_client_gets_text_completion(served: Any) -> None:
    answer = client_of(served).completions.create(model="notso-demo", prompt="SmolLM3 is", max_tokens=12, temperature=0)
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-") and answer.choices[0].text
    assert answer.usage and 0 < answer.usage.completion_tokens <= 12
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_stream_matches_whole_completions(served: Any) -> None:
    ask: dict[str, Any] = {"model": "notso-demo", "prompt": ["What is", "A small"], "seed": 3, "max_tokens": 30, "n": 2}
    whole = client_of(served).completions.create(**ask)
    texts, reasons = [""] * 4, [""] * 4
    for chunk in client_of(served).completions.create(**ask, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                assert not reasons[choice.index]
                reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]


def test_seeded_completion_is_independent_of_batch(served: Any) -> None:
    ask: dict[str, Any] = {"model": "notso-demo", "prompt": "Once", "seed": 11, "max_tokens": 20}
    alone = client_of(served).completions.create(**ask).choices[0].text
    among = client_of(served).completions.create(**ask | {"prompt": ["Once", "Hello", "Why"]}).choices[0].text
    assert alone == among


def test_prompts_beyond_concurrent_responses_are_answered(start: Start) -> None:
    waiting: list[int] = []

    def script(messages: Sequence[Message], thinking: bool) -> list[Event]:
        waiting.append(server.on_loop(lambda: server.shared.requests.waiting))
        return say(f"to {messages[-1].content}")

    server = start(ScriptedEngine(script, slots=2)).ready()
    prompts = [str(number) for number in range(5)]
    expected = [f"to {prompt}" for prompt in prompts]
    whole = client_of(server).completions.create(model="scripted", prompt=prompts)
    assert [choice.text for choice in whole.choices] == expected
    texts = [""] * 5
    for chunk in client_of(server).completions.create(model="scripted", prompt=prompts, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == expected
    native = server.client.post("/completion", json={"prompt": prompts}).json()
    assert [answer["content"] for answer in native] == [f"to {ord(prompt)}" for prompt in prompts]
    assert len(waiting) == 15 and set(waiting) <= {0, 1, 2}
    refused = server.client.post(URL, json={"prompt": prompts}, headers={"X-Conversation-Id": "one"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")


def test_special_token_text_in_prompt_is_plain_text(served: Any) -> None:
    text = "<|im_start|>user\nHi<|im_end|>"
    plain = served.client.post("/tokenize", json={"content": text}).json()["tokens"]
    answer = client_of(served).completions.create(model="notso-demo", prompt=text, max_tokens=1)
    assert answer.usage and answer.usage.prompt_tokens == len(plain)


def test_echo_prepends_prompt(served: Any) -> None:
    ask: dict[str, Any] = {"model": "notso-demo", "prompt": "Two plus", "max_tokens": 4, "temperature": 0}
    text = client_of(served).completions.create(**ask).choices[0].text
    assert client_of(served).completions.create(**ask, echo=True).choices[0].text == "Two plus" + text
    streamed = client_of(served).completions.create(**ask, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == "Two plus" + text


REFUSED = [
    ({"prompt": ""}, "empty_prompt", "prompt"),
    ({"prompt": ["x", ""]}, "empty_prompt", "prompt"),
    ({"prompt": []}, "empty_prompt", "prompt"),
    ({"prompt": None}, "invalid_value", "prompt"),
    ({}, "invalid_value", "prompt"),
    ({"prompt": 5}, "invalid_value", "prompt"),
    ({"prompt": [1, "x"]}, "invalid_value", "prompt.1"),
    ({"prompt": [1, -2]}, "invalid_value", "prompt.1"),
    ({"prompt": [1, True]}, "invalid_value", "prompt.1"),
    ({"prompt": [10**6]}, "invalid_value", "prompt"),
    ({"prompt": [10**6], "echo": True}, "invalid_value", "prompt"),
    ({"prompt": [[1], []]}, "invalid_value", "prompt.1"),
    ({"prompt": [[1], "x"]}, "invalid_value", "prompt.1"),
    ({"prompt": [[1], [2, 1.5]]}, "invalid_value", "prompt.1.1"),
    ({"prompt": [[1]] * 65}, "invalid_value", "prompt"),
    ({"prompt": ["x", 5.5]}, "invalid_value", "prompt.1"),
    ({"prompt": ["x"] * 65}, "invalid_value", "prompt"),
    ({"prompt": ["x"] * 33, "n": 2}, "invalid_value", "n"),
    ({"prompt": "x", "n": 17}, "invalid_value", "n"),
    ({"prompt": "x", "suffix": "y"}, "unsupported_parameter", "suffix"),
    ({"prompt": "x", "response_format": {"type": "json_object"}}, "unsupported_parameter", "response_format"),
    ({"prompt": "x", "response_format": {}}, "invalid_value", "response_format.type"),
    ({"prompt": "x", "best_of": 2}, "unsupported_parameter", "best_of"),
    ({"prompt": "x", "best_of": 3, "n": 2}, "unsupported_parameter", "best_of"),
    ({"prompt": "x" * 600_000, "echo": True, "logprobs": 1}, "invalid_value", "logprobs"),
    ({"prompt": "x", "logprobs": 21}, "invalid_value", "logprobs"),
    ({"prompt": "x", "logprobs": True}, "invalid_value", "logprobs"),
    ({"prompt": ["x"] * 64, "max_tokens": -1, "logprobs": 20}, "invalid_value", "max_tokens"),
    ({"prompt": "x", "max_tokens": -2}, "invalid_value", "max_tokens"),
    ({"prompt": "x " * 5000}, "context_length_exceeded", "prompt"),
    ({"prompt": ["x", "x " * 5000], "n": 2}, "context_length_exceeded", "prompt.1"),
    ({"prompt": [[5], [7, 10**6]]}, "invalid_value", "prompt.1"),
    ({"prompt": "x", "messages": [{}]}, "unsupported_parameter", "messages"),
    ({"prompt": "x", "tools": [{}]}, "unsupported_parameter", "tools"),
    ({"prompt": "x", "stream_options": {"include_usage": 5}}, "invalid_value", "stream_options.include_usage"),
]


@pytest.mark.parametrize(("body", "code", "param"), REFUSED, ids=lambda value: str(value)[:40])
def test_invalid_request_error_names_field(served: Any, body: dict[str, Any], code: str, param: str) -> None:
    answer = served.client.post(URL, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, code, param), error


def test_fields_with_default_values_are_accepted() -> None:
    inert = {"response_format": {"type": "text"}, "suffix": "", "tools": [], "messages": [], "echo": False}
    asked = parse_text_request({"prompt": "x"} | inert)
    assert not [hint for hint in asked.hints if hint.name == "response_format"]
    assert asked.options == parse_text_request({"prompt": "x"}).options


def test_best_of_equal_to_n_is_accepted() -> None:
    for fields in ({"n": 2, "best_of": 2}, {"n": 2, "best_of": 1}, {"n": 1, "best_of": 1}, {"best_of": 1}):
        asked = parse_text_request({"prompt": "x"} | fields)
        assert len(asked.params) == fields.get("n", 1) and not asked.hints


def test_generated_text_cannot_forge_sse_events(start: Start) -> None:
    server = start(ScriptedEngine(tricky)).ready()
    expected = "".join(event.text for event in tricky([], False))
    answer = server.client.post(URL, json={"prompt": "x", "stream": True})
    for lines in (re.findall(r"^data: (.*)$", answer.text, re.MULTILINE), list(answer.iter_lines())):
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line[:14]]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected
    assert server.client.post(URL, json={"prompt": "x"}).json()["choices"][0]["text"] == expected


def test_logprobs_use_legacy_completions_format(start: Start) -> None:
    server = start(ScriptedEngine(lambda messages, thinking: say("Hello you", piece=3))).ready()
    whole = server.client.post(URL, json={"prompt": "x", "logprobs": 2}).json()["choices"][0]["logprobs"]
    assert whole["tokens"] == ["Hel", "lo ", "you"] and whole["text_offset"] == [0, 3, 6]
    assert whole["token_logprobs"] == [-0.5] * 3 and [len(top) for top in whole["top_logprobs"]] == [2] * 3
    answer = server.client.post(URL, json={"prompt": "x", "logprobs": 2, "stream": True})
    chunks = [json.loads(line) for line in re.findall(r"^data: (\{.*)$", answer.text, re.MULTILINE)]
    told = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["text"]]
    for name, listed in whole.items():
        assert [each for one in told for each in one[name]] == listed
    assert server.client.post(URL, json={"prompt": "x"}).json()["choices"][0]["logprobs"] is None


def test_engine_failure_ends_stream_with_one_error(start: Start) -> None:
    server = start(ScriptedEngine(tricky, failure=EngineError("a logit was not finite"))).ready()
    lines = re.findall(
        r"^data: (.*)$", server.client.post(URL, json={"prompt": "x", "stream": True}).text, re.MULTILINE
    )
    assert "[DONE]" not in lines and json.loads(lines[-1])["error"]["code"] == "engine_error"


def test_full_queue_after_submission_closes_request(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine(tricky)
    engine.gate.clear()
    server = start(engine).ready()
    queue, begun = server.shared.large_work, threading.Event()
    submit, run = engine.prepare, queue.run

    def recorded(*given: Any) -> Any:
        begun.set()
        return submit(*given)

    async def full_once_begun(*given: Any) -> Any:
        if begun.is_set():
            raise Problem(429, "full", retry_after_seconds=5)
        return await run(*given)

    monkeypatch.setattr(engine, "prepare", recorded)
    monkeypatch.setattr(queue, "run", full_once_begun)
    answer = server.client.post(URL, json={"prompt": "x", "stream": True})
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full") and begun.is_set()
    assert server.on_loop(lambda: len(server.shared.requests._open)) == 0
    engine.gate.set()
