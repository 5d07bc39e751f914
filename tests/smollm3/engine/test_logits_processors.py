"""Users' logits processors affect exactly their own request's answer and no others."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from notso.smollm3 import Engine, EngineError, InvalidRequestError, Message, RequestOptions, SamplingParams
from notso.smollm3.sampling.logits_processor import RowFunction

QUESTION = [Message("user", "Count to ten: one, two, three, one, two, three, one, two, three,")]
PARAMS = SamplingParams(max_tokens=24, temperature=0.0)
Floats = np.ndarray


def function(change: Callable[[Floats, Floats], Floats]) -> RowFunction:
    def run(tokens: memoryview, logits: memoryview) -> bytes:
        row = np.frombuffer(logits, np.float32).copy()
        return change(np.frombuffer(tokens, np.int32), row).astype(np.float32).tobytes()

    return run


SEEN: list[int] = []


def counting(tokens: Floats, logits: Floats) -> Floats:
    SEEN.append(len(tokens))
    return logits


def lifted(tokens: Floats, logits: Floats) -> Floats:
    logits[int(logits.argmax()) if len(tokens) % 3 else tokens[-1]] -= 5.0
    return logits


def failing(tokens: memoryview, logits: memoryview) -> bytes:
    raise EngineError("the plugin x was switched off")


FUNCTIONS: dict[str, RowFunction] = {
    "counting": function(counting),
    "lifted": function(lifted),
    "failing": failing,
    "nan": function(lambda tokens, logits: logits * np.nan),
    "empty": function(lambda tokens, logits: logits - np.inf),
    "infinite": function(lambda tokens, logits: logits + np.inf),
    "short": function(lambda tokens, logits: logits[:-1]),
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load(context_tokens=512, threads=1, find_processor=FUNCTIONS.get) as loaded:
        yield loaded


def answer(engine: Engine, *names: str, params: SamplingParams = PARAMS) -> str:
    generation = engine.submit(QUESTION, params, RequestOptions(thinking=False, logits_processors=names))
    return "".join(event.text for event in generation.events())


def test_identity_processor_sees_each_row_once_and_keeps_answer(engine: Engine) -> None:
    SEEN.clear()
    assert answer(engine, "counting") == answer(engine)
    assert list(range(SEEN[0], SEEN[0] + len(SEEN))) == SEEN and len(SEEN) > 5


def test_processor_answers_are_the_same_with_and_without_drafts() -> None:
    """With and without drafts, processors are called in the same order and give the same answer."""
    for params in (PARAMS, SamplingParams(max_tokens=24, temperature=0.8, seed=7)):
        texts = []
        for speculation in (True, False):
            with Engine.load(
                context_tokens=512, threads=1, speculation=speculation, find_processor=FUNCTIONS.get
            ) as loaded:
                texts.append([answer(loaded, "lifted", params=params) for _ in range(2)])
        assert texts[0][0] == texts[0][1] == texts[1][0] == texts[1][1]


def test_processor_does_not_affect_other_requests_in_the_batch(engine: Engine) -> None:
    alone = answer(engine)
    changed = answer(engine, "lifted")
    assert alone != changed
    generations = [
        engine.submit(QUESTION, PARAMS, RequestOptions(thinking=False, logits_processors=names))
        for names in ((), ("lifted",), (), ("failing",), ("lifted",), ())
    ]
    texts = ["".join(event.text for event in each.events()) for each in generations]
    assert texts == [alone, changed, alone, "", changed, alone]


@pytest.mark.parametrize("name", ["failing", "nan", "empty", "infinite", "short"])
def test_failing_processor_fails_only_one_request(engine: Engine, name: str) -> None:
    generation = engine.submit(QUESTION, PARAMS, RequestOptions(logits_processors=(name,)))
    last = list(generation.events())[-1]
    assert last.kind == "error" and str(last.error).count(name.replace("failing", "plugin x")) == 1
    assert answer(engine)


def test_logprobs_are_computed_before_the_processor(engine: Engine) -> None:
    """Log probabilities are those of the model, before a processor changes the logits."""
    options = RequestOptions(thinking=False, logits_processors=("lifted",), top_logprobs=1)
    plain = RequestOptions(thinking=False, top_logprobs=1)
    first, other = (
        next(event for event in engine.submit(QUESTION, PARAMS, each).events() if event.logprobs)
        for each in (options, plain)
    )
    assert first.logprobs[0].top == other.logprobs[0].top


def test_unknown_logits_processor_is_rejected(engine: Engine) -> None:
    with pytest.raises(InvalidRequestError, match="no logits processor 'nobody'") as refusal:
        answer(engine, "nobody")
    assert refusal.value.param == "logits_processors"
    with pytest.raises(InvalidRequestError):
        RequestOptions(logits_processors="lifted")  # type: ignore[arg-type]
