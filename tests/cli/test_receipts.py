"""`notso run --receipt` and `notso verify --receipt` with the demo model."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from notso.smollm3 import Engine, Replay, RequestOptions, SamplingParams
from notso.smollm3.engine.receipts import _hash, sealed
from notso.smollm3.engine.request import ids_digest

Run = Callable[..., Any]


def test_receipt_is_written_and_verified(notso: Run, tmp_path: Path) -> None:
    path = tmp_path / "answer.json"
    answer = notso("run", "Tell me something", "--temperature", "1.2", "--max-tokens", "40", "--receipt", str(path))
    assert answer.code in (0, 8)
    told = json.loads(path.read_text())
    checked = notso("verify", "--receipt", str(path))
    assert checked.code == 0 and "all equal" in checked.out and f"{told['answer']['tokens']:,} tokens" in checked.out

    several, closed = tmp_path / "several.json", tmp_path / "sealed.json"
    several.write_text(json.dumps([told, told]))
    assert f"{2 * told['answer']['tokens']:,} tokens" in notso("verify", "--receipt", str(several)).out
    assert notso("verify", "--receipt", str(several), "--transcript", str(path)).code == 2, "the counts differ"
    closed.write_text(json.dumps(sealed(told)))
    assert notso("verify", "--receipt", str(closed)).code == 1
    assert notso("verify", "--receipt", str(closed), "--transcript", str(path)).code == 0

    told["answer"]["ids"][3] += 1
    told["answer"]["sha256"] = ids_digest(told["answer"]["ids"])
    told.pop("digest")
    path.write_text(json.dumps(told | {"digest": _hash(told)}))
    found = notso("verify", "--receipt", str(path), "--json")
    assert found.code == 1 and json.loads(found.out)["place"] == 3
    whole = json.loads(several.read_text())[0]
    several.write_text(json.dumps([whole, json.loads(path.read_text())]))
    found = notso("verify", "--receipt", str(several))
    assert found.code == 1 and "receipt 2: token 3 is " in found.err


@pytest.mark.parametrize(("context", "prompt_tokens"), [(4096, 4076), (4097, 500)])
def test_receipt_is_verified_with_the_rope_scaling_that_it_records(
    notso: Run, tmp_path: Path, context: int, prompt_tokens: int
) -> None:
    """The demo model uses YaRN if the context is above 4,096 tokens, whatever the length of prompt and answer."""
    prompt = [random.Random(at).randrange(5, 900) for at in range(prompt_tokens)]
    params = SamplingParams(seed=1, max_tokens=20, temperature=1.5, ignore_eos=True)
    with Engine.load(None, threads=1, context_tokens=context) as engine:
        events = list(engine.submit(prompt, params, RequestOptions(token_ids=True)).events())
        ids = tuple(token for event in events for token in event.token_ids)
        receipt = engine.receipt(prompt, params, RequestOptions(replay=Replay(ids)))
    assert receipt["answer"]["tokens"] == 20
    path = tmp_path / "answer.json"
    path.write_text(json.dumps(receipt))
    assert notso("verify", "--receipt", str(path)).code == 0


def test_invalid_receipts_are_refused(notso: Run, tmp_path: Path) -> None:
    path = tmp_path / "odd.json"
    path.write_text("{")
    assert notso("verify", "--receipt", str(path)).code == 2
    for text in ("[]", "{}", '{"notso_receipt": 1}', '{"prompt": {"tokens": 5}, "kv_format": []}'):
        path.write_text(text)
        assert notso("verify", "--receipt", str(path)).code == 1
    assert notso("verify", "--transcript", str(path)).code == 2
    where = str(tmp_path / "no" / "such.json")
    assert notso("run", "Hello", "--no-think", "--receipt", where).code == 2


def test_answer_is_printed_before_a_receipt_that_cannot_be_written(notso: Run) -> None:
    result = notso("run", "Hello", "--no-think", "--json", "--receipt", "/dev/full")
    assert result.code == 4 and "/dev/full: No space left" in result.err
    assert json.loads(result.out)["text"]
