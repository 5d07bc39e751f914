"""Arguments of the wrong type raise our error, which names the field."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from notso.async_engine import AsyncEngine
from notso.smollm3 import Engine, InvalidRequestError, Message, Replay, RequestOptions, SamplingParams, ToolName


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


@pytest.mark.parametrize("value", [0, "", (), np.array([1, 2])], ids=repr)
def test_falsy_params_and_options_are_refused(engine: Engine, value: Any) -> None:
    for name in ("params", "options"):
        with pytest.raises(InvalidRequestError) as caught:
            engine.chat("x", **{name: value})
        assert caught.value.param == name


@pytest.mark.parametrize("value", ["no", 1, None, np.array([1, 2])], ids=repr)
@pytest.mark.parametrize("name", ["thinking", "continue_last", "parallel_tool_calls", "is_plain", "token_ids"])
def test_flags_must_be_booleans(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        RequestOptions(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize("value", [np.array([1, 2]), [], 5], ids=repr)
@pytest.mark.parametrize("name", ["tool_choice", "priority", "when_full"])
def test_choices_must_be_text(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        RequestOptions(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize("value", [None, 5, b"x"])
def test_names_within_options_must_be_text(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="tool_choice must be"):
        RequestOptions(tool_choice=ToolName(value))
    with pytest.raises(InvalidRequestError, match="origin is text"):
        Replay((1,), (), value)


@pytest.mark.parametrize(
    "prompt", [{1: 1}, {0: 1}.values(), {1}, {"role": "user"}, 5, None, np.array([[1, 2]]), np.array(5)], ids=repr
)
def test_prompts_that_are_not_sequences_are_refused(engine: Engine, prompt: Any) -> None:
    for use in (
        engine.continue_text,
        engine.submit,
        lambda each: engine.embed([each]),
        engine.estimate,
        engine.speculative_prefill,
    ):
        with pytest.raises(InvalidRequestError) as caught:
            use(prompt)
        assert caught.value.param == "messages"


@pytest.mark.parametrize("value", [None, True, 5, 1.5, np.array(5)], ids=repr)
def test_measurements_refuse_arguments_of_wrong_type(engine: Engine, value: Any) -> None:
    for use in (
        *(engine.tokenize, engine.detokenize, engine.token_bytes, engine.logits),
        *(engine.batch, engine.chat, engine.embed, engine.count_tokens, engine.render),
        *(lambda each: SamplingParams(stop=each), lambda each: SamplingParams(stop_token_ids=each)),
    ):
        with pytest.raises(InvalidRequestError):
            use(value)
    with pytest.raises(InvalidRequestError):
        asyncio.run(AsyncEngine(engine).batch(value))


@pytest.mark.parametrize("name", [[], {}, 5, "missing"], ids=repr)
def test_adapters_that_are_not_names_are_refused(engine: Engine, name: Any) -> None:
    for use in (lambda each: engine.logits([1], adapter=each), engine.adapters.of, engine.adapters.remove):
        with pytest.raises(InvalidRequestError) as caught:
            use(name)
        assert caught.value.param == "adapter"


def test_messages_are_refused_at_the_first_invalid_one(engine: Engine) -> None:
    messages = iter([5, 6])
    with pytest.raises(InvalidRequestError, match=r"messages\[0\] must be"):
        engine.chat(messages)  # type: ignore[arg-type]
    assert list(messages) == [6]  # the iterator could be endless


class Dataset:
    """Like the datasets of PyTorch, it is iterable only by index."""

    def __init__(self, *items: str) -> None:
        self.items = items

    def __getitem__(self, place: int) -> str:
        return self.items[place]


def test_values_that_are_iterable_only_by_index_are_accepted(engine: Engine) -> None:
    texts: Any = Dataset("a", "b")
    assert len(engine.batch(texts, max_tokens=1)) == len(engine.embed(texts)) == 2
    assert len(asyncio.run(AsyncEngine(engine).batch(texts, max_tokens=1))) == 2
    assert SamplingParams(stop=texts).stop == ("a", "b")


def test_message_errors_name_the_list(engine: Engine) -> None:
    messages: Any = np.array([Message("user", "x")] * 2, object)
    for use in (engine.submit, engine.estimate):
        with pytest.raises(InvalidRequestError, match="messages must be a list of Messages"):
            use(messages)


def test_deques_of_messages_are_prefilled(engine: Engine) -> None:
    engine.speculative_prefill(deque([Message("user", "x")]))
