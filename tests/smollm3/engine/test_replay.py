"""An answer continued from replayed tokens equals the original bit for bit and event by event."""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from notso.smollm3 import (
    Engine,
    Event,
    InvalidRequestError,
    Message,
    QuoteSource,
    Replay,
    RequestOptions,
    SamplingParams,
)
from notso.smollm3.values.engine_config import KV_CHOICES, KVChoice
from notso.smollm3.values.request_options import Grammar

WEATHER: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Weather", "parameters": WEATHER}}]
REPORT = QuoteSource(
    "In Oslo it rains on four days of seven, and the wind of the fjord is cold in every month.", "report"
)
QUOTED = {"type": "object", "properties": {"city": {"type": "string", "x-quote-of": "report"}}, "required": ["city"]}
OPTIONS = {
    "thinking": RequestOptions(),
    "tools": RequestOptions(tools=TOOLS, tool_choice="required"),
    "strict tools": RequestOptions(tools=TOOLS, strict_tools=("weather",)),
    "json": RequestOptions(grammar=Grammar("json_schema", json.dumps(WEATHER))),
    "continued": RequestOptions(continue_last=True),
    "quotation": RequestOptions(continue_last=True, sources=(REPORT,)),
    "quoted field": RequestOptions(grammar=Grammar("json_schema", json.dumps(QUOTED)), sources=(REPORT,)),
}
PARAMS = {
    "plain": SamplingParams(temperature=1.2, max_tokens=60),
    "budget": SamplingParams(temperature=1.0, max_tokens=60, thinking_budget=5),
    "penalties": SamplingParams(temperature=1.1, max_tokens=60, repetition_penalty=1.3, frequency_penalty=0.4),
    "stop": SamplingParams(temperature=1.0, max_tokens=60, stop=("e",)),
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load(None, threads=1, context_tokens=1024) as loaded:
        yield loaded


@dataclass
class Written:
    """The content of an answer's events."""

    events: list[Event]

    @property
    def shown(self) -> tuple[object, ...]:
        calls = [(e.tool_call.name, e.tool_call.arguments) for e in self.events if e.tool_call is not None]
        parts = ["".join(e.text for e in self.events if e.kind == kind) for kind in ("reasoning", "text")]
        usage = next(e.usage for e in self.events if e.usage is not None)
        counts = usage.completion_tokens, usage.reasoning_tokens, usage.prompt_tokens
        return (*parts, calls, self.events[-1].finish_reason, self.events[-1].stop, counts)

    @property
    def replay(self) -> Replay:
        ids: tuple[int, ...] = ()
        closed_at: tuple[int, ...] = ()
        for event in self.events:
            if event.kind == "tokens":
                closed_at += (len(ids),) if event.is_forced else ()
                ids += event.token_ids
        return Replay(ids, closed_at, next(e.origin for e in self.events if e.kind == "started"))


def write(engine: Engine, messages: Sequence[Message], params: SamplingParams, options: RequestOptions) -> Written:
    return Written(list(engine.submit(messages, params, replace(options, token_ids=True)).events()))


def cut(replay: Replay, place: int) -> Replay:
    return Replay(replay.ids[:place], tuple(at for at in replay.closed_at if at < place), replay.origin)


def asked(options: RequestOptions) -> list[Message]:
    begun = (
        [Message("assistant", "The report: [[1:" if options.sources else "The weather")]
        if options.continue_last
        else []
    )
    return [Message("user", "How is the weather in Oslo?"), *begun]


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_replayed_answer_continues_identically_from_any_token(
    engine: Engine, options: RequestOptions, params: SamplingParams
) -> None:
    params, messages = replace(params, seed=7), asked(options)
    whole = write(engine, messages, params, options)
    replay = whole.replay
    assert len(replay.ids) == next(e.usage.completion_tokens for e in whole.events if e.usage is not None)
    inside = {at + offset for at in replay.closed_at for offset in (1, 2)}
    for place in sorted({*range(0, len(replay.ids), 5), len(replay.ids)} - inside):
        again = write(engine, messages, params, replace(options, replay=cut(replay, place)))
        assert again.shown == whole.shown
        assert replay.ids[:place] + again.replay.ids == replay.ids, "the new ids must follow the replayed ones"


def test_replayed_answer_ends_within_its_limit_as_before(engine: Engine) -> None:
    options = RequestOptions(thinking=False, grammar=Grammar("regex", "[a-c]{1,30}( x)?"))
    messages, params = [Message("user", "Quote it [[1: ")], SamplingParams(max_tokens=3, temperature=0.7, seed=708)
    whole = write(engine, messages, params, options)
    for place in range(len(whole.replay.ids) + 1):
        again = write(engine, messages, params, replace(options, replay=cut(whole.replay, place)))
        assert again.shown == whole.shown


def test_replay_ends_reasoning_where_answer_now_was_called(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    messages, params = asked(RequestOptions()), SamplingParams(seed=3, max_tokens=40)
    ended, step = threading.Event(), engine._core._step

    def waiting() -> None:
        if any(each.output.tokens >= 4 for each in engine._core._requests.values()):  # its reasoning ends soon
            assert ended.wait(60)
        step()

    monkeypatch.setattr(engine._core, "_step", waiting)
    generation = engine.submit(messages, params, RequestOptions(token_ids=True))
    for event in generation.events():
        if event.kind == "reasoning":
            generation.answer_now()
            ended.set()
    whole = Written(list(generation.events()))
    (closed,) = whole.replay.closed_at
    for place in (closed, closed + 3, len(whole.replay.ids)):
        given = replace(cut(whole.replay, place), closed_at=whole.replay.closed_at)
        again = write(engine, messages, params, RequestOptions(replay=given))
        if place > closed:
            assert again.shown == whole.shown


def test_replay_recomputes_at_most_one_block(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    messages, params = asked(RequestOptions()), SamplingParams(seed=1, max_tokens=300, ignore_eos=True)
    options = RequestOptions(thinking=False)
    whole = write(engine, messages, params, options)
    prompt = next(e.usage.prompt_tokens for e in whole.events if e.usage is not None)
    run, counts = engine._core.runner.run, list[int]()
    monkeypatch.setattr(
        engine._core.runner,
        "run",
        lambda chunks, *rest, **more: counts.extend(chunk.count for chunk in chunks) or run(chunks, *rest, **more),
    )
    for place in (7, 140, 299):
        counts.clear()
        before = engine.stats()
        replay = cut(whole.replay, place)
        list(engine.submit(messages, replace(params, max_tokens=place + 1), replace(options, replay=replay)).events())
        assert 0 < sum(counts) <= 128
        after = engine.stats()
        assert after.prompt_tokens_total - before.prompt_tokens_total == prompt
        assert 0 <= after.cached_tokens_total - before.cached_tokens_total <= prompt


FORKS = int(os.environ.get("FORKS", 12))


@pytest.mark.parametrize("kv", KV_CHOICES[1:])
def test_branch_of_a_replay_matches_a_cold_engine(kv: KVChoice) -> None:
    """Branches at FORKS positions of a block; FORKS=1000 tests all of them in each format."""
    messages, params = asked(RequestOptions()), SamplingParams(seed=2, max_tokens=260, ignore_eos=True, temperature=1.5)
    options = RequestOptions(thinking=False)
    with Engine.load(None, threads=1, context_tokens=1024, kv=kv) as warm:
        whole = write(warm, messages, params, options).replay
        prompt = warm.encode_chat(messages, options)
        rng = random.Random(kv)
        with Engine.load(None, threads=1, context_tokens=1024, kv=kv) as cold:
            for number in range(-(-FORKS // len(KV_CHOICES[1:]))):
                at = 128 - len(prompt) % 128 + (number * 37) % 128
                branch = (*whole.ids[:at], rng.randrange(256))
                few = replace(params, max_tokens=len(branch) + 4)
                forked = write(warm, messages, few, replace(options, replay=Replay(branch))).replay.ids
                cold.clear_cache()
                behind = replace(params, max_tokens=4)
                fresh = write(cold, [*prompt, *branch], behind, replace(options, is_plain=False)).replay.ids
                assert forked == fresh and len(forked) == 4, (kv, at)


def test_invalid_replay_is_rejected(engine: Engine) -> None:
    messages, params = asked(RequestOptions()), SamplingParams(seed=1, max_tokens=20)
    whole = write(engine, messages, params, RequestOptions())
    bad = {
        "another origin": replace(whole.replay, origin="0" * 64),
        "no such token": Replay((10**6,)),
        "after the end": Replay((*whole.replay.ids, 5)),
    }
    for name, replay in bad.items():
        with pytest.raises(InvalidRequestError) as refused:
            engine.submit(messages, params, RequestOptions(replay=replay))
        assert refused.value.param in ("replay", "messages"), name
    with pytest.raises(InvalidRequestError):
        Replay((-1,))
