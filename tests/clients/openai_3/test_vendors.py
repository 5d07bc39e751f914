"""The vendors' own clients with their defaults."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import pytest
from anthropic import beta_tool
from pydantic import BaseModel, Field

HELLO: Any = [{"role": "user", "content": "Hello"}]


class City(BaseModel):
    """The fields are bounded, so that a randomly generated answer ends."""

    name: str = Field(max_length=40)
    inhabitants: int = Field(ge=0, le=100_000_000)


class Weather(BaseModel):
    """The weather of a city."""

    city: str


def of_openai(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


def of_anthropic(address: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=address, api_key="none", max_retries=0)


@pytest.mark.parametrize("stream", [False, True])
def test_openai_chat_on_the_demo_model_stops_at_max_tokens(demo: str, stream: bool) -> None:
    answer = of_openai(demo).chat.completions.create(model="notso-demo", messages=HELLO, stream=stream, max_tokens=9)
    if isinstance(answer, openai.Stream):
        assert [chunk.choices[0].finish_reason for chunk in answer if chunk.choices][-1] == "length"
    else:
        assert answer.choices[0].finish_reason == "length" and answer.usage and answer.usage.completion_tokens == 9


def test_openai_forced_tool_call_matches_its_schema(demo: str) -> None:
    tool = openai.pydantic_function_tool(City)
    answer = of_openai(demo).chat.completions.create(
        model="notso-demo",
        messages=HELLO,
        tools=[tool],
        tool_choice={"type": "function", "function": {"name": "City"}},
        extra_body={"reasoning_effort": "none"},
    )
    calls = answer.choices[0].message.tool_calls
    assert calls and calls[0].type == "function"
    City.model_validate_json(calls[0].function.arguments)


def test_openai_parse_returns_typed_tool_arguments(scripted: str) -> None:
    answer = of_openai(scripted).chat.completions.parse(
        model="scripted", messages=HELLO, tools=[openai.pydantic_function_tool(Weather)]
    )
    calls = answer.choices[0].message.tool_calls
    assert calls and calls[0].function.parsed_arguments == Weather(city="Vienna")


def test_openai_parse_returns_typed_response(scripted: str) -> None:
    answer = of_openai(scripted).chat.completions.parse(model="scripted", messages=HELLO, response_format=City)
    assert answer.choices[0].message.parsed == City(name="Vienna", inhabitants=7)


def test_openai_responses_create_continue_parse_and_stream(scripted: str) -> None:
    client = of_openai(scripted)
    first = client.responses.create(model="scripted", input="Hello")
    assert first.output_text == "You said: Hello"
    assert client.responses.create(model="scripted", input="On", previous_response_id=first.id).output_text.endswith(
        "On"
    )
    parsed = client.responses.parse(model="scripted", input="Hello", text_format=City)
    assert parsed.output_parsed == City(name="Vienna", inhabitants=7)
    with client.responses.stream(model="scripted", input="Hello") as stream:
        assert stream.get_final_response().output_text == "You said: Hello"


def test_anthropic_messages_create_stream_count_and_parse(scripted: str) -> None:
    client = of_anthropic(scripted)
    ask: Any = {"model": "scripted", "max_tokens": 99, "messages": HELLO}
    assert client.messages.create(**ask).content[0].text == "You said: Hello"
    with client.messages.stream(**ask) as stream:
        assert stream.get_final_text() == "You said: Hello"
    assert client.messages.count_tokens(model="scripted", messages=HELLO).input_tokens > 0
    assert client.messages.parse(**ask, output_format=City).parsed_output == City(name="Vienna", inhabitants=7)


def test_anthropic_max_tokens_beyond_context_is_accepted(demo: str) -> None:
    counted = of_anthropic(demo).messages.count_tokens(model="notso-demo", messages=HELLO).input_tokens
    message = of_anthropic(demo).messages.create(model="notso-demo", max_tokens=16_384, messages=HELLO)
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == counted


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_tool_runner_calls_the_tool(scripted: str, stream: bool) -> None:
    asked: list[str] = []

    @beta_tool
    def weather(city: str) -> str:
        """The weather of a city."""
        asked.append(city)
        return "Sunny."

    runner = of_anthropic(scripted).beta.messages.tool_runner(
        model="scripted", max_tokens=99, tools=[weather], messages=HELLO, stream=stream
    )
    last = runner.until_done()
    assert asked == ["Vienna"] and last.content[0].text == "You said: Sunny."
