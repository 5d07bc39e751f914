"""Agent frameworks with their defaults: a tool call, the use of its result, and structured output."""

from __future__ import annotations

import asyncio
from typing import Any

import agents
import langchain.agents
import llm
import openai
import pydantic_ai
import pytest
import smolagents
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from pydantic import BaseModel
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class City(BaseModel):
    name: str
    inhabitants: int


VIENNA = City(name="Vienna", inhabitants=7)
SUNNY = "You said: Sunny."


def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: Its name.
    """
    assert city == "Vienna"
    return "Sunny."


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("streamed", [False, True])
def test_openai_agents_use_tools_and_structured_output(scripted: str, api: str, streamed: bool) -> None:
    async def run(agent: Any) -> Any:
        if not streamed:
            return (await agents.Runner.run(agent, "Hello")).final_output
        result = agents.Runner.run_streamed(agent, "Hello")
        async for _ in result.stream_events():
            pass
        return result.final_output

    async def both() -> None:
        client = openai.AsyncOpenAI(base_url=f"{scripted}/v1", api_key="none", max_retries=0)
        kind = agents.OpenAIChatCompletionsModel if api == "chat" else agents.OpenAIResponsesModel
        common: Any = {"name": "Guide", "model": kind(model="scripted", openai_client=client)}
        assert await run(agents.Agent(**common, tools=[agents.function_tool(weather)])) == SUNNY
        assert await run(agents.Agent(**common, output_type=City)) == VIENNA

    agents.set_tracing_disabled(True)
    asyncio.run(both())


@pytest.mark.parametrize("api", ["chat", "responses", "anthropic"])
def test_pydantic_ai_uses_tools_and_structured_output(scripted: str, api: str) -> None:
    if api == "anthropic":
        model: Any = AnthropicModel("scripted", provider=AnthropicProvider(base_url=scripted, api_key="none"))
    else:
        kind = OpenAIChatModel if api == "chat" else OpenAIResponsesModel
        model = kind("scripted", provider=OpenAIProvider(base_url=f"{scripted}/v1", api_key="none"))
    assert pydantic_ai.Agent(model, tools=[weather]).run_sync("Hello").output == SUNNY
    assert pydantic_ai.Agent(model, output_type=City).run_sync("Hello").output == VIENNA
    assert pydantic_ai.Agent(model, tools=[weather], output_type=City).run_sync("Hello").output == VIENNA


def chat_models(address: str) -> dict[str, Any]:
    return {
        "chat": ChatOpenAI(base_url=f"{address}/v1", api_key="none", model="scripted"),
        "responses": ChatOpenAI(base_url=f"{address}/v1", api_key="none", model="scripted", use_responses_api=True),
        "anthropic": ChatAnthropic(base_url=address, api_key="none", model="scripted"),
    }


@pytest.mark.parametrize("api", ["chat", "responses", "anthropic"])
def test_langchain_chats_streams_and_uses_tools(scripted: str, api: str) -> None:
    model = chat_models(scripted)[api]
    assert model.invoke("Hello").text == "You said: Hello"
    assert "".join(chunk.text for chunk in model.stream("Hello")) == "You said: Hello"
    assert model.with_structured_output(City).invoke("Hello") == VIENNA
    agent = langchain.agents.create_agent(model, tools=[weather])
    assert agent.invoke({"messages": [HumanMessage("Hello")]})["messages"][-1].text == SUNNY


@pytest.mark.parametrize("api", ["chat", "responses", "anthropic"])
def test_langgraph_runs_named_agents(scripted: str, api: str) -> None:
    model = chat_models(scripted)[api]
    graph = StateGraph(MessagesState)
    for name in ("planner", "writer"):
        graph.add_node(name, langchain.agents.create_agent(model, tools=[weather], name=name))
    graph.add_edge(START, "planner")
    graph.add_edge("planner", "writer")
    graph.add_edge("writer", END)
    messages = graph.compile().invoke({"messages": [HumanMessage("Hello", name="anna")]})["messages"]
    assert {message.name for message in messages if message.type == "ai"} == {"planner", "writer"}
    assert messages[-1].text.startswith("You said:")


@pytest.mark.parametrize("kind", ["ToolCallingAgent", "CodeAgent"])
def test_smolagents_call_tools_and_generate_text(scripted: str, kind: str) -> None:
    model = smolagents.OpenAIServerModel("scripted", api_base=f"{scripted}/v1", api_key="none")
    if kind == "ToolCallingAgent":
        agent: Any = smolagents.ToolCallingAgent(tools=[smolagents.tool(weather)], model=model, max_steps=3)
        assert agent.run("Hello") == "Vienna" and len(agent.memory.steps) == 3
    else:
        answer = model.generate([smolagents.ChatMessage(role="user", content="Hello")], stop_sequences=["Observation:"])
        assert answer.content == "You said: Hello"


def test_llm_library_prompts_streams_and_calls_tools(scripted: str) -> None:
    from llm.default_plugins.openai_models import Chat

    model = Chat("ours", model_name="scripted", api_base=f"{scripted}/v1", supports_tools=True, supports_schema=True)
    assert model.prompt("Hello", key="none", stream=False).text() == "You said: Hello"
    assert model.prompt("Hello", key="none").text() == "You said: Hello"
    assert City.model_validate_json(model.prompt("Hello", key="none", schema=City, stream=False).text()) == VIENNA
    assert model.chain("Hello", key="none", tools=[weather]).text() == SUNNY
    assert isinstance(llm.get_models(), list)
