"""Prompts as token ids, and their log probabilities, as lm-evaluation-harness and similar programs request them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from notso.smollm3 import Engine, Event, TokenLogprob
from notso.smollm3.sampling.sampler import log_probabilities
from notso.web.api.completions.fields import TextSerializer, parse_text_request
from notso.web.api.shared.completion import Completion

URL = "/v1/completions"
TEXT = "Caf\u00e9 \U0001f600 is open."
SCORED = {"echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load(threads=1) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest, engine: Engine) -> Iterator[Any]:
    """A server with the demo model."""
    shared = request.getfixturevalue("shared")
    settings = type(shared.shared.settings)(port=0, data_dir=tmp_path_factory.mktemp("text"))
    server = type(shared)(lambda: Engine.load(threads=1), settings)
    yield server.ready()
    server.close()


def asked(served: Any, **fields: Any) -> dict[str, Any]:
    answer = served.client.post(URL, json=fields)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def test_token_id_prompt_matches_text_prompt(served: Any, engine: Engine) -> None:
    ids = engine.tokenize(TEXT)
    more: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "echo": True}
    by_text = asked(served, prompt=TEXT, **more)["choices"][0]
    assert asked(served, prompt=ids, **more)["choices"][0] == by_text
    assert by_text["text"].startswith(TEXT)
    both = asked(served, prompt=[ids, engine.tokenize("Two plus")], **more)["choices"]
    assert [choice["text"] for choice in both] == [
        by_text["text"],
        asked(served, prompt="Two plus", **more)["choices"][0]["text"],
    ]
    control = min(engine.tokenizer.control_ids)
    body = asked(served, prompt=[control, *ids], **more)
    assert body["choices"][0]["text"].startswith(engine.detokenize([control]) + TEXT)
    assert body["usage"]["prompt_tokens"] == len(ids) + 1


def test_echo_returns_prompt_logprobs(served: Any, engine: Engine) -> None:
    ids = engine.tokenize(TEXT)
    body = asked(served, prompt=ids, **SCORED)
    told = body["choices"][0]["logprobs"]
    # one entry more than the prompt: clients drop the last one, which belongs to the generated token
    assert {len(listed) for listed in told.values()} == {len(ids) + 1}
    expected = log_probabilities(engine.logits(ids))
    assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
    for at, token in enumerate(ids[1:], 1):
        assert told["token_logprobs"][at] == pytest.approx(float(expected[at - 1, token]), abs=1e-6)
        assert list(told["top_logprobs"][at].values()) == pytest.approx([float(expected[at - 1].max())], abs=1e-6)
    text = body["choices"][0]["text"]
    for at, (offset, token) in enumerate(zip(told["text_offset"][: len(ids)], told["tokens"], strict=False)):
        assert token.startswith("bytes:") or text[offset:].startswith(token), (at, offset, token)
    assert body["usage"]["completion_tokens"] == 1


def test_partial_characters_are_reported_as_bytes(served: Any, engine: Engine) -> None:
    ids = engine.tokenize("\U0001f600")
    assert len(ids) > 1
    told = asked(served, prompt=ids, **SCORED | {"max_tokens": 0})["choices"][0]["logprobs"]
    spelt = b"".join(bytes.fromhex(token.removeprefix("bytes:").replace("\\x", "")) for token in told["tokens"])
    assert spelt.decode() == "\U0001f600" and set(told["text_offset"]) == {0}


def test_max_tokens_0_returns_prompt_only(served: Any, engine: Engine) -> None:
    for prompt in (TEXT, engine.tokenize(TEXT)):
        body = asked(served, prompt=prompt, **SCORED | {"max_tokens": 0})
        assert body["choices"][0]["text"] == TEXT and body["choices"][0]["finish_reason"] == "length"
        assert len(body["choices"][0]["logprobs"]["tokens"]) == len(engine.tokenize(TEXT))
        assert body["usage"]["completion_tokens"] == 0
    assert asked(served, prompt=TEXT, max_tokens=0)["choices"][0]["text"] == ""


def test_stream_matches_whole_prompt_logprobs(served: Any) -> None:
    fields: dict[str, Any] = {"prompt": [TEXT * 12, "Two plus"], "n": 2, "seed": 5, **SCORED, "max_tokens": 12}
    whole = asked(served, **fields)["choices"]
    answer = served.client.post(URL, json=fields | {"stream": True})
    told: list[dict[str, Any]] = [{"text": ""} for _ in whole]
    for line in re.findall(r"^data: (\{.*)$", answer.text, re.MULTILINE):
        for choice in json.loads(line)["choices"]:
            told[choice["index"]]["text"] += choice["text"]
            for name, listed in (choice["logprobs"] or {}).items():
                told[choice["index"]].setdefault(name, []).extend(listed)
    assert told == [{"text": choice["text"], **choice["logprobs"]} for choice in whole]


def test_prompt_logprobs_bypass_prefix_cache(served: Any) -> None:
    long = "The same words again. " * 40
    asked(served, prompt=long, max_tokens=1)
    once, again = (asked(served, prompt=long, **SCORED) for _ in range(2))
    assert once["choices"] == again["choices"] and None not in once["choices"][0]["logprobs"]["token_logprobs"][1:]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_stop_token_without_text_gets_logprob_entry() -> None:
    """A stop token has no text but still gets an entry, so the lists are always one longer than the prompt."""
    request = parse_text_request({"prompt": "ab", "echo": True, "logprobs": 0})
    serializer = TextSerializer(request, Completion("m", "fp"))
    first = TokenLogprob("ab", tuple(b"ab"), float("nan"))
    end = TokenLogprob("<|im_end|>", tuple(b"<|im_end|>"), -0.25)
    for event in (Event("prompt", logprobs=(first,)), Event("end", finish_reason="stop", logprobs=(end,))):
        list(serializer.feed(0, event))
    assert serializer.body()["choices"][0]["logprobs"] == {
        "tokens": ["ab", "<|im_end|>"],
        "token_logprobs": [None, -0.25],
        "top_logprobs": [None, {}],
        "text_offset": [0, 2],
    }
