"""Clients that require an older openai package, with their defaults."""

from __future__ import annotations

from typing import Any

import instructor
import litellm
import openai
import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

HELLO: Any = [{"role": "user", "content": "Hello"}]
SAID = "You said: Hello"


class City(BaseModel):
    name: str
    inhabitants: int


VIENNA = City(name="Vienna", inhabitants=7)


def weather(city: str) -> str:
    """The weather of a city."""
    return "Sunny." if city == "Vienna" else "Unknown."


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_instructor_returns_structured_output(scripted: str, mode: str) -> None:
    plain = openai.OpenAI(base_url=f"{scripted}/v1", api_key="none", max_retries=0)
    client = instructor.from_openai(plain, mode=instructor.Mode[mode])
    found = client.chat.completions.create(model="scripted", messages=HELLO, response_model=City)
    assert found.model_dump() == VIENNA.model_dump()


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])
def test_litellm_completes_streams_and_calls_tools(scripted: str, provider: str) -> None:
    base = scripted if provider == "anthropic" else f"{scripted}/v1"
    ask: Any = {"model": f"{provider}/scripted", "messages": HELLO, "api_base": base, "api_key": "none"}
    assert litellm.completion(**ask).choices[0].message.content == SAID
    assert "".join(part.choices[0].delta.content or "" for part in litellm.completion(**ask, stream=True)) == SAID
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "weather", "description": "Weather.", "parameters": schema}}
    (call,) = litellm.completion(**ask, tools=[tool]).choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Vienna"}')


def test_llama_index_chats_streams_and_calls_tools(scripted: str) -> None:
    model = OpenAILike(
        model="scripted",
        api_base=f"{scripted}/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
    )
    hello = [ChatMessage(role="user", content="Hello")]
    assert model.chat(hello).message.content == SAID
    assert [*model.stream_chat(hello)][-1].message.content == SAID
    tool = FunctionTool.from_defaults(weather)
    assert model.predict_and_call([tool], "Hello").response == "Sunny."
    assert model.as_structured_llm(City).chat(hello).raw == VIENNA
