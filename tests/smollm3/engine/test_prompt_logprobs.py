"""Log probabilities of a prompt's tokens equal those from `Engine.logits`, with any other requests and cached
blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from notso.smollm3 import Engine, Event, InvalidRequestError, RequestOptions, SamplingParams, TokenLogprob
from notso.smollm3.engine import input_processor, memory_plan
from notso.smollm3.sampling.sampler import likeliest, log_probabilities
from notso.smollm3.scheduling.scheduler import Scheduler
from notso.smollm3.scheduling.sequence import MAX_SAMPLED

IDS = [300 + i * i % 500 for i in range(300)]
GREEDY = SamplingParams(max_tokens=4, temperature=0.0)
SCORED = RequestOptions(prompt_logprobs=2, top_logprobs=2, is_plain=True)


@pytest.fixture(scope="module", params=["k8v8", "k4v3"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine.load(context_tokens=1024, kv=request.param, max_num_seqs=4) as engine:
        yield engine


def scores_of(events: list[Event]) -> list[TokenLogprob]:
    return [entry for event in events if event.kind == "prompt" for entry in event.logprobs]


def require_scores(engine: Engine, ids: list[int], found: list[TokenLogprob]) -> None:
    """Assert that they equal those of the whole context's logits, bit for bit."""
    expected = log_probabilities(engine.logits(ids))
    assert len(found) == len(ids)
    assert math.isnan(found[0].logprob) and found[0].top == ()
    for at, entry in enumerate(found[1:], 1):
        row = expected[at - 1]
        assert entry.bytes == tuple(engine.tokenizer.token_bytes(ids[at]))
        assert entry.logprob == row[ids[at]]
        assert [each.logprob for each in entry.top] == [row[token] for token in likeliest(row, 2)]


def test_prompt_logprobs_match_engine_logits(engine: Engine) -> None:
    events = list(engine.generate(IDS, GREEDY, SCORED))
    require_scores(engine, IDS, scores_of(events))
    plain = list(engine.generate(IDS, GREEDY, RequestOptions(is_plain=True)))
    said = [event.text for event in events if event.kind == "text"]
    assert "".join(said) == "".join(event.text for event in plain if event.kind == "text")


def test_prompt_logprobs_recompute_cached_tokens(engine: Engine) -> None:
    list(engine.generate(IDS, GREEDY, RequestOptions(is_plain=True)))
    again = list(engine.generate(IDS, GREEDY, SCORED))
    assert next(event.usage for event in again if event.usage).cached_tokens == 0
    require_scores(engine, IDS, scores_of(again))
    after = list(engine.generate(IDS, GREEDY, RequestOptions(is_plain=True)))
    assert next(event.usage for event in after if event.usage).cached_tokens > 0  # other requests find its blocks


def test_concurrent_prompt_logprobs_match_engine_logits(engine: Engine) -> None:
    asked = [IDS[:number] for number in (1, 2, 9, 130, 200, 64, 65)]
    running = [engine.submit(ids, GREEDY, SCORED) for ids in asked]
    company = [engine.submit(IDS[5:], SamplingParams(max_tokens=30, seed=3)) for _ in range(3)]
    for ids, generation in zip(asked, running, strict=True):
        require_scores(engine, ids, scores_of(list(generation.events())))
    texts = {"".join(event.text for event in each.events()) for each in company}
    assert len(texts) == 1


def test_preempted_request_reports_each_prompt_logprob_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are blocks for little more than two requests, so the last one is preempted."""
    monkeypatch.setattr(memory_plan, "SHARED_TOKENS", 1024)
    with Engine.load(context_tokens=512, max_num_seqs=3) as engine:
        params = SamplingParams(max_tokens=180, temperature=0.0, ignore_eos=True)
        asked = [[500 + number, *IDS[:299]] for number in range(3)]  # no common prefix
        running = [engine.submit(ids, params, SCORED) for ids in asked]
        found = [scores_of(list(generation.events())) for generation in running]
        assert engine.stats().preemptions_total
        for ids, scores in zip(asked, found, strict=True):
            require_scores(engine, ids, scores)


def test_prompt_only_request_generates_no_tokens(engine: Engine) -> None:
    options = RequestOptions(prompt_logprobs=0, top_logprobs=0, prompt_only=True, is_plain=True)
    events = list(engine.generate(IDS[:50], SamplingParams(max_tokens=1), options))
    assert len(scores_of(events)) == 50
    usage = next(event.usage for event in events if event.usage)
    assert (usage.prompt_tokens, usage.completion_tokens) == (50, 0)
    assert events[-1].finish_reason == "length" and not [event for event in events if event.kind == "text"]


def test_logprobs_include_end_and_control_tokens(engine: Engine) -> None:
    """Tokens that end the answer or are not shown are included, because callers count tokens."""
    end, control = min(engine.tokenizer.end_ids), min(engine.tokenizer.control_ids - engine.tokenizer.end_ids)
    for forced in (end, control, engine.tokenize("\u00e9\U0001f600")[0]):
        params = SamplingParams(max_tokens=1, temperature=0.0, logit_bias={forced: 100.0})
        events = list(engine.generate(IDS[:20], params, SCORED))
        told = [entry for event in events if event.kind in ("text", "end") for entry in event.logprobs]
        assert [entry.bytes for entry in told] == [tuple(engine.tokenizer.token_bytes(forced))]


def test_prompt_logprobs_stay_within_sampled_rows_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[int] = []
    schedule = Scheduler.schedule

    def noted(self: Scheduler, *given: Any) -> Any:
        plan = schedule(self, *given)
        wanted.append(plan.sampled_rows)
        return plan

    monkeypatch.setattr(Scheduler, "schedule", noted)
    with Engine.load(context_tokens=512, max_num_seqs=64) as engine:
        short = SamplingParams(max_tokens=5, temperature=0.0)
        running = [engine.submit(IDS[: 3 + number], short, SCORED) for number in range(70)]
        found = [scores_of(list(generation.events())) for generation in running]
    assert [len(each) for each in found] == [3 + number for number in range(70)]
    assert max(wanted) <= MAX_SAMPLED


def test_too_many_prompt_logprobs_are_rejected(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_processor, "MAX_PROMPT_ENTRIES", 300)
    list(engine.generate(IDS[:100], GREEDY, SCORED))
    with pytest.raises(InvalidRequestError) as caught:
        engine.submit(IDS[:101], GREEDY, SCORED)
    assert caught.value.param == "prompt_logprobs"


def test_plain_token_ids_give_the_same_answer_as_text(engine: Engine) -> None:
    ids = engine.tokenize("SmolLM3 is")
    by_text = list(engine.generate("SmolLM3 is", GREEDY))
    by_ids = list(engine.generate(ids, GREEDY, RequestOptions(is_plain=True)))
    assert [event.text for event in by_ids if event.text] == [event.text for event in by_text if event.text]
    assert np.isfinite([entry.logprob for entry in scores_of(list(engine.generate(ids, GREEDY, SCORED)))[1:]]).all()
