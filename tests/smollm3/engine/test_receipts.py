"""An unchanged receipt is reproduced token by token, and every change in a receipt is detected and named."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from smollm3.engine.test_replay import OPTIONS, PARAMS, Written, asked, cut, write
from smollm3.held_engine import close_at_submit

from notso.smollm3 import (
    Engine,
    EngineError,
    FixedPrefix,
    InvalidRequestError,
    Message,
    ModelError,
    RequestOptions,
    SamplingParams,
)
from notso.smollm3.engine import memory_plan
from notso.smollm3.engine.receipts import ReceiptCheck, _hash, sealed
from notso.smollm3.engine.request import ids_digest
from notso.smollm3.hub.registry import demo_path
from notso.smollm3.values.request_options import Grammar


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load(None, threads=1, context_tokens=1024) as loaded:
        yield loaded


def receipt_of(engine: Engine, params: SamplingParams, options: RequestOptions) -> dict[str, Any]:
    messages = asked(options)
    written = write(engine, messages, params, options)
    told = engine.receipt(messages, params, replace(options, replay=written.replay))
    return json.loads(json.dumps(told))  # type: ignore[no-any-return]


def signed_again(receipt: dict[str, Any]) -> dict[str, Any]:
    """Recompute all hashes of a changed receipt, as an attacker who knows the format would."""
    for part in ("prompt", "answer"):
        receipt[part] |= {"tokens": len(receipt[part]["ids"]), "sha256": ids_digest(receipt[part]["ids"])}
    receipt["options"].pop("sha256")
    receipt["options"]["sha256"] = _hash(receipt["options"])
    receipt.pop("digest")
    return receipt | {"digest": _hash(receipt)}


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_unchanged_receipt_is_reproduced(engine: Engine, options: RequestOptions, params: SamplingParams) -> None:
    receipt = receipt_of(engine, replace(params, seed=11), options)
    found = engine.check_receipt(receipt)
    assert (found.problem, found.place) == ("", None) and found.tokens == receipt["answer"]["tokens"] > 0
    closed = sealed(receipt)
    assert engine.check_receipt(closed, receipt) == found
    text = json.dumps(closed)
    assert '"ids"' not in text and "weather" not in text and "Oslo" not in text, "a receipt must not contain any text"


def test_earlier_receipt_that_names_an_excluded_strict_tool_is_reproduced(engine: Engine) -> None:
    receipt = receipt_of(engine, SamplingParams(seed=3, max_tokens=9), RequestOptions())
    receipt["options"]["strict_tools"] = ["weather"]  # as with tool_choice "none"
    assert engine.check_receipt(signed_again(receipt)).problem == ""


def test_receipt_of_continued_text_is_reproduced(engine: Engine) -> None:
    biases = {9: 1.0, 300: 2.0, 1000: -0.5}  # numbers are sorted in another order than text
    params = SamplingParams(seed=4, max_tokens=20, temperature=1.3, logit_bias=biases)
    options = RequestOptions(token_ids=True)
    written = Written(list(engine.submit("Once upon", params, options).events()))
    receipt = engine.receipt("Once upon", params, RequestOptions(replay=written.replay))
    assert engine.check_receipt(json.loads(json.dumps(receipt))).problem == ""


@pytest.mark.parametrize("thinking", [False, True])
def test_receipt_of_token_ids_and_a_grammar_is_reproduced(engine: Engine, thinking: bool) -> None:
    """Unlike a chat template, token ids do not show whether the answer may begin with reasoning."""
    ids, params = engine.tokenize("How is the weather?"), SamplingParams(seed=4, temperature=0, max_tokens=20)
    open_id = engine.tokenizer.think_open_id
    assert open_id is not None
    params = replace(params, logit_bias={open_id: 100.0})  # the model samples the tag wherever it is allowed
    options = RequestOptions(thinking=thinking, grammar=Grammar("regex", "[0-9]{3}"), token_ids=True)
    written = Written(list(engine.submit(ids, params, options).events()))
    assert (open_id in written.replay.ids) == thinking
    receipt = engine.receipt(ids, params, replace(options, replay=written.replay))
    assert engine.check_receipt(json.loads(json.dumps(receipt))).problem == ""


def test_receipt_of_a_stopped_answer_is_reproduced(engine: Engine) -> None:
    params, messages = SamplingParams(seed=5, max_tokens=80, ignore_eos=True), [Message("user", "Go on")]
    written = write(engine, messages, params, RequestOptions())
    stopped = replace(written.replay, ids=written.replay.ids[:30], closed_at=())
    receipt = engine.receipt(messages, params, RequestOptions(replay=stopped))
    assert receipt["answer"]["finish_reason"] == "cancelled" and engine.check_receipt(receipt).problem == ""


def test_receipt_is_not_judged_by_an_engine_that_is_closed_meanwhile(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped answer would be confirmed without a comparison, because an unfinished check looks like one, too."""
    params, messages = SamplingParams(seed=5, max_tokens=80, ignore_eos=True), [Message("user", "Go on")]
    written = write(engine, messages, params, RequestOptions())
    stopped = replace(written.replay, ids=written.replay.ids[:30], closed_at=())
    receipt = engine.receipt(messages, params, RequestOptions(replay=stopped))
    with Engine.load(None, threads=1, context_tokens=1024) as other:
        close_at_submit(other, monkeypatch)
        with pytest.raises(EngineError, match="closed"):
            other.check_receipt(receipt)


STEERED = {
    "reasoning": (RequestOptions(grammar=Grammar("choice", '["a"]')), 1024),
    "cut off": (replace(OPTIONS["json"], thinking=False), 7),
}


@pytest.mark.parametrize(("options", "tokens"), STEERED.values(), ids=STEERED)
def test_receipt_is_reproduced_by_an_engine_with_a_smaller_context(
    engine: Engine, options: RequestOptions, tokens: int
) -> None:
    """The recorded limit determines where a grammar ends an answer, whatever the context of the checking engine."""
    params = SamplingParams(seed=0, temperature=1.2)
    replay = cut(write(engine, asked(options), params, options).replay, tokens)
    receipt = engine.receipt(asked(options), params, replace(options, replay=replay))
    needed = receipt["prompt"]["tokens"] + receipt["answer"]["tokens"] + 1
    assert needed < receipt["limit"]
    with Engine.load(None, threads=1, context_tokens=needed) as small:
        assert small.check_receipt(receipt).problem == ""


def test_receipt_of_an_answer_about_long_documents_is_reproduced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt with a fixed prefix can be longer than the context of other prompts."""
    monkeypatch.setattr(memory_plan, "DEFAULT_CONTEXT_TOKENS", 512)
    document = "The pump is switched on by the green button. " * 80
    params, messages = SamplingParams(seed=5, max_tokens=20), [Message("user", f"{document} Go on")]
    options = RequestOptions(prefix=FixedPrefix(0, len(document)))
    with Engine.load(None, threads=1, document_tokens=2048) as long:
        replay = write(long, messages, params, options).replay
        receipt = long.receipt(messages, params, replace(options, replay=replay))
        assert long.info.context_tokens < receipt["prompt"]["tokens"] < long.info.document_tokens
        assert long.check_receipt(receipt).problem == ""


def test_receipt_with_min_tokens_above_the_limit_is_reproduced(engine: Engine) -> None:
    messages, params = [Message("user", "word " * 900)], SamplingParams(seed=2, min_tokens=5000, stop=("e",))
    options = RequestOptions(thinking=False)
    replay = write(engine, messages, params, options).replay
    receipt = engine.receipt(messages, params, replace(options, replay=replay))
    assert receipt["answer"]["tokens"] == receipt["limit"] < receipt["sampling"]["min_tokens"]
    assert engine.check_receipt(json.loads(json.dumps(receipt))).problem == ""


def test_receipt_does_not_name_another_file_that_replaced_the_model(tmp_path: Path) -> None:
    path, copy_of_it = tmp_path / "model.gguf", tmp_path / "other.gguf"
    for each in (path, copy_of_it):
        shutil.copy(demo_path(), each)
    params, options = SamplingParams(seed=5, max_tokens=3), RequestOptions()
    with Engine.load(path, threads=1, context_tokens=256) as loaded:
        messages = [Message("user", "Go on")]
        replay = write(loaded, messages, params, options).replay
        for change, reason in ((lambda: copy_of_it.replace(path), "replaced"), (path.unlink, "no longer be read")):
            change()
            with pytest.raises(EngineError, match=reason):
                loaded.receipt(messages, params, replace(options, replay=replay))


def without(receipt: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a valid receipt that lacks a field, like one of an earlier version."""
    rest = {key: value for key, value in receipt.items() if key not in (name, "digest")}
    return rest | {"digest": _hash(rest)}


def test_receipt_is_refused_by_an_engine_without_its_rope_scaling(engine: Engine) -> None:
    trained = engine.config.max_position_embeddings
    with Engine.load(None, threads=1, context_tokens=trained + 1) as long:
        receipt = receipt_of(long, SamplingParams(seed=3, max_tokens=20), RequestOptions())
        assert receipt["rope_scaling"] == "yarn" and long.check_receipt(receipt).problem == ""
        with pytest.raises(InvalidRequestError, match=r"another rope scaling; .* more than 4,096 tokens") as refused:
            engine.check_receipt(receipt)
        assert refused.value.param == "rope_scaling"
        short = receipt_of(engine, SamplingParams(seed=3, max_tokens=20), RequestOptions())
        assert short["rope_scaling"] == "none"
        with pytest.raises(InvalidRequestError, match=r"another rope scaling; .* up to 4,096 tokens"):
            long.check_receipt(short)


def test_receipt_that_does_not_record_the_rope_scaling_is_reproduced(engine: Engine) -> None:
    receipt = receipt_of(engine, SamplingParams(seed=3, max_tokens=20), RequestOptions())
    old = without(receipt, "rope_scaling")
    assert engine.check_receipt(old).problem == ""
    for transcript in (old, receipt):
        assert engine.check_receipt(sealed(old), transcript).problem == ""
    false = signed_again(copy.deepcopy(receipt) | {"rope_scaling": "yarn"})
    with pytest.raises(InvalidRequestError, match="rope scaling"):
        engine.check_receipt(sealed(false), old)


def test_changed_token_is_detected_at_its_position(engine: Engine) -> None:
    rng = random.Random(1)
    receipt = receipt_of(engine, SamplingParams(seed=3, temperature=1.2, max_tokens=60), RequestOptions())
    ids = receipt["answer"]["ids"]
    for place in rng.sample(range(len(ids)), 12):
        changed = copy.deepcopy(receipt)
        changed["answer"]["ids"][place] = (ids[place] + rng.randrange(1, 200)) % engine.config.vocab_size
        with pytest.raises(InvalidRequestError) as refused:
            engine.check_receipt(changed)
        assert refused.value.param == "digest"
        found = engine.check_receipt(signed_again(changed))
        assert found.place == place and found.problem, (place, found)


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "model": lambda told: told["model"].update(sha256="0" * 64),
    "template": lambda told: told["template"].update(sha256="0" * 64),
    "adapter": lambda told: told.update(adapter={"name": "none", "sha256": "0" * 64}),
    "arithmetic": lambda told: told.update(arithmetic=told["arithmetic"] + 1),
    "rope_scaling": lambda told: told.update(rope_scaling="yarn"),
    "kv_format": lambda told: told.update(kv_format="q8_0" if told["kv_format"] != "q8_0" else "f16"),
    "finish": lambda told: told["answer"].update(finish_reason="length"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_receipt_field_is_rejected_or_reported(engine: Engine, change: Callable[[dict[str, Any]], Any]) -> None:
    receipt = receipt_of(engine, SamplingParams(seed=3, max_tokens=60), RequestOptions())
    change(receipt)
    try:
        found = engine.check_receipt(signed_again(receipt))
    except InvalidRequestError as error:
        assert error.param in (*CHANGES, "adapter")
    else:
        assert change is CHANGES["finish"] and found.problem and found.place is None


def test_changed_seed_or_parameter_is_detected_at_first_difference(engine: Engine) -> None:
    messages, params = asked(RequestOptions()), SamplingParams(seed=3, temperature=1.5, max_tokens=60)
    receipt = receipt_of(engine, params, RequestOptions())
    others = [replace(params, seed=seed) for seed in range(10, 16)]
    others += [replace(params, temperature=t) for t in (0.0, 0.7, 1.4)] + [replace(params, top_p=0.5)]
    for other in others:
        written = write(engine, messages, other, RequestOptions()).replay.ids
        pairs = zip(receipt["answer"]["ids"], (*written, -1), strict=False)
        place = next((at for at, (mine, theirs) in enumerate(pairs) if mine != theirs), None)
        told = copy.deepcopy(receipt) | {"seed": other.seed}
        told["sampling"] = {"temperature": other.temperature, "top_p": other.top_p}
        assert engine.check_receipt(signed_again(told)).place == place


ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    1 << 70,
    1.5,
    float("nan"),
    "x",
    "0" * 64,
    [],
    [[]],
    [1 << 70],
    [-1],
    {},
    {"a": 1},
)


def test_odd_receipt_fields_do_not_crash_the_check(engine: Engine) -> None:
    """Whatever a receipt with matching hashes contains, the check ends, with one of its two errors or with a result."""
    receipt = receipt_of(engine, SamplingParams(seed=3, max_tokens=9), OPTIONS["strict tools"])
    fields = [(name,) for name in receipt if name != "digest"]
    fields += [(part, name) for part in receipt if isinstance(receipt[part], dict) for name in receipt[part]]
    for (*parts, name), value in itertools.product(fields, ODD):
        odd = copy.deepcopy(receipt)
        (odd[parts[0]] if parts else odd)[name] = value
        if parts == ["options"] and name != "sha256":
            odd["options"]["sha256"] = _hash({key: odd["options"][key] for key in odd["options"] if key != "sha256"})
        odd.pop("digest")
        with contextlib.suppress(ModelError):
            assert isinstance(engine.check_receipt(odd | {"digest": _hash(odd)}), ReceiptCheck)


def test_invalid_receipt_is_rejected(engine: Engine) -> None:
    receipt = receipt_of(engine, SamplingParams(seed=3, max_tokens=9), RequestOptions())
    for bad in (None, [], {}, {"notso_receipt": 2}, {**receipt, "prompt": 1}, {**receipt, "form": "x"}):
        with pytest.raises(InvalidRequestError):
            engine.check_receipt(bad)  # type: ignore[arg-type]
    for part, name, value in (
        ("prompt", "ids", "abc"),
        ("answer", "ids", [[1]]),
        ("answer", "closed_at", 5),
        ("options", "grammar", {"kind": "x"}),
        ("options", "strict_tools", None),
        ("sampling", "temperature", "hot"),
        ("sampling", "logit_bias", {"a": 1}),
    ):
        odd = copy.deepcopy(receipt)
        odd[part][name] = value
        odd["options"]["sha256"] = _hash({key: odd["options"][key] for key in odd["options"] if key != "sha256"})
        odd.pop("digest")
        with pytest.raises(InvalidRequestError):
            engine.check_receipt(odd | {"digest": _hash(odd)})
    with pytest.raises(InvalidRequestError, match="transcript"):
        engine.check_receipt(sealed(receipt))
    other = receipt_of(engine, SamplingParams(seed=4, max_tokens=9), RequestOptions())
    with pytest.raises(InvalidRequestError, match="seed"):
        engine.check_receipt(sealed(receipt), other)
