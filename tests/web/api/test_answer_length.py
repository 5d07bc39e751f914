"""max_tokens is an upper limit: if the context has less room, the answer is shorter and the request is not refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from notso.smollm3 import Engine, Message, RequestOptions
from notso.web.api.chat_completions.fields import parse_chat_request

CONTEXT = 256
FAR_TOO_MANY = 1_000_000
MODEL = "notso-demo"
CHAT_PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load(threads=1, context_tokens=CONTEXT) as engine:
        yield engine


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest, engine: Engine) -> Iterator[Any]:
    """A server with the demo model and a small context."""
    shared = request.getfixturevalue("shared")
    settings = type(shared.shared.settings)(port=0, data_dir=tmp_path_factory.mktemp("length"))
    server = type(shared)(lambda: engine, settings)
    yield server.ready()
    server.close()


@pytest.fixture(scope="module")
def question(engine: Engine) -> list[Any]:
    """Return a question that leaves only a few tokens of the context for the answer."""
    text, options = "Say it:", RequestOptions(thinking=False)
    while engine.count_tokens([Message("user", text + " word")], options) <= CONTEXT - 4:
        text += " word"
    return [{"role": "user", "content": text}]


def left(engine: Engine, question: list[Any], thinking: bool) -> int:
    messages = [Message("user", question[0]["content"])]
    return CONTEXT - engine.count_tokens(messages, RequestOptions(thinking=thinking))


@pytest.mark.parametrize("stream", [False, True])
def test_chat_completion_stops_at_end_of_context(
    served: Any, engine: Engine, question: list[Any], stream: bool
) -> None:
    client = openai.OpenAI(base_url=f"{served.address}/v1", api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": MODEL, "messages": question, "reasoning_effort": "none"}
    room = left(engine, question, thinking=False)
    if stream:
        *_, end, counts = client.chat.completions.create(
            **asked, max_tokens=FAR_TOO_MANY, stream=True, stream_options={"include_usage": True}
        )
        assert end.choices[0].finish_reason == "length" and counts.usage.completion_tokens == room
        return
    answer = client.chat.completions.create(**asked, max_completion_tokens=FAR_TOO_MANY)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage and answer.usage.completion_tokens == room


def test_text_completion_stops_at_end_of_context(served: Any, question: list[Any]) -> None:
    client = openai.OpenAI(base_url=f"{served.address}/v1", api_key="none", max_retries=0)
    text = question[0]["content"]
    answer = client.completions.create(model=MODEL, prompt=text, max_tokens=FAR_TOO_MANY, temperature=0)
    assert answer.usage
    assert answer.choices[0].finish_reason == "length" and answer.usage.total_tokens == CONTEXT


def test_response_stops_at_end_of_context(served: Any, engine: Engine, question: list[Any]) -> None:
    client = openai.OpenAI(base_url=f"{served.address}/v1", api_key="none", max_retries=0)
    answer = client.responses.create(
        model=MODEL, input=question, max_output_tokens=FAR_TOO_MANY, reasoning={"effort": "none"}
    )
    assert answer.status == "incomplete" and answer.incomplete_details and answer.usage
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage.output_tokens == left(engine, question, thinking=False)


@pytest.mark.parametrize(("most", "reason"), [(FAR_TOO_MANY, "model_context_window_exceeded"), (1, "max_tokens")])
def test_stop_reason_distinguishes_context_end_from_max_tokens(
    served: Any, question: list[Any], most: int, reason: str
) -> None:
    client = anthropic.Anthropic(base_url=served.address, api_key="none", max_retries=0, timeout=60)
    asked: dict[str, Any] = {"model": MODEL, "messages": question, "max_tokens": most}
    assert client.messages.create(**asked).stop_reason == reason
    with client.messages.stream(**asked) as events:
        assert events.get_final_message().stop_reason == reason


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_ollama_answer_stops_at_end_of_context(served: Any, question: list[Any], path: str) -> None:
    body = {"stream": False, "think": False, "options": {"num_predict": FAR_TOO_MANY}}
    said = {"messages": question} if path.endswith("chat") else {"prompt": question[0]["content"]}
    answer = served.client.post(path, json=body | said).json()
    assert answer["done_reason"] == "length" and answer["prompt_eval_count"] + answer["eval_count"] == CONTEXT


@pytest.mark.parametrize("path", [*CHAT_PATHS, "/v1/completions", "/api/generate"])
def test_prompt_longer_than_context_returns_400(served: Any, engine: Engine, path: str) -> None:
    text = "word " * CONTEXT
    said = {"messages": [{"role": "user", "content": text}]}
    body = {"/v1/responses": {"input": text}, "/v1/completions": {"prompt": text}, "/api/generate": {"prompt": text}}
    answer = served.client.post(
        path, json={"max_tokens": 5} | body.get(path, said) if path == "/v1/messages" else body.get(path, said)
    )
    assert answer.status_code == 400 and f"the context is {CONTEXT}" in answer.text
    error = answer.json()["error"]
    if path.startswith("/v1"):
        param = {"/v1/responses": "input", "/v1/completions": "prompt"}.get(path, "messages")
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)


def test_work_limit_counts_max_tokens_only_up_to_max_context() -> None:
    asked = parse_chat_request(
        {
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": FAR_TOO_MANY,
            "logprobs": True,
            "top_logprobs": 20,
        }
    )
    assert asked.params[0].max_tokens == FAR_TOO_MANY
