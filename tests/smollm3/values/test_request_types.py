"""Arguments of the wrong type raise our error, which names the field."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from notso.smollm3 import Engine, InvalidRequestError, Message, RequestOptions, SamplingParams


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load() as loaded:
        yield loaded


@pytest.mark.parametrize("messages", [None, 5, [], [Message("user", "x"), 5], "", [1.5], [None]])
def test_messages_of_wrong_type_are_refused(engine: Engine, messages: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        engine.generate(messages)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "arguments", [{1, 2}, {"a": {1}}, b"{}", object()], ids=["set", "nested set", "bytes", "object"]
)
def test_tool_call_arguments_that_are_not_json_are_refused(engine: Engine, arguments: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    with pytest.raises(InvalidRequestError, match="not valid JSON") as caught:
        engine.chat([{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}])
    assert caught.value.param == "messages[1].tool_calls[0]"


@pytest.mark.parametrize("name", ["\ud800", 5])
def test_names_that_are_not_valid_text_are_refused(engine: Engine, name: Any) -> None:
    for param, refuse in (
        ("owner", lambda: engine.clear_cache(name, "x")),
        ("conversation", lambda: engine.clear_cache("x", name)),
        ("name", lambda: engine.forget_reading(name)),
        ("scope", lambda: engine.forget_reading("x", scope=name)),
        ("owner", lambda: engine.forget_reading("x", owner=name)),
        ("owner", lambda: engine.reading("x", owner=name)),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            refuse()
        assert caught.value.param == param


@pytest.mark.parametrize(("name", "owner", "param"), [(None, "", "name"), ("x", None, "owner")])
def test_reading_without_a_name_is_refused(engine: Engine, name: Any, owner: Any, param: str) -> None:
    for use in (engine.reading, engine.forget_reading):
        with pytest.raises(InvalidRequestError) as caught:
            use(name, owner=owner)
        assert caught.value.param == param


def test_swapped_parameters_and_options_are_refused(engine: Engine) -> None:
    turns, params, options = [Message("user", "x")], SamplingParams(), RequestOptions()
    uses: list[Any] = [engine.submit, engine.prepare, engine.generate, engine.speculative_prefill, engine.receipt]
    for use in uses:
        for given, param in ((options, None), "params"), ((None, params), "options"), ((options, params), "params"):
            with pytest.raises(InvalidRequestError) as caught:
                use(turns, *given)
            assert caught.value.param == param
    others: list[Any] = [engine.render, engine.encode_chat, engine.count_tokens, engine.estimate]
    for use in others:
        with pytest.raises(InvalidRequestError) as caught:
            use(turns, params)
        assert caught.value.param == "options"


@pytest.mark.parametrize("tools", [5, "get_weather", {"name": "x"}])
def test_tools_of_wrong_type_are_refused(engine: Engine, tools: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        engine.generate([Message("user", "x")], options=RequestOptions(tools=tools))
    assert caught.value.param == "tools"


@pytest.mark.parametrize(
    ("field", "value"), [("stop", None), ("stop", 5), ("logit_bias", [1]), ("logit_bias", None), ("logit_bias", "x")]
)
def test_sampling_params_of_wrong_type_are_refused(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
