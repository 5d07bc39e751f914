"""llama.cpp's native completion endpoint with the demo model: accepted fields and response contents."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from scripted_engine import ScriptedEngine, say

from notso.smollm3 import Engine, Event, Message
from notso.web.api.llama_cpp.request import parse_native_request, tokenize_request

Start = Callable[..., Any]
GREEDY = {"prompt": "SmolLM3 is", "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A server with the demo model."""
    shared = request.getfixturevalue("shared")
    settings = type(shared.shared.settings)(port=0, data_dir=tmp_path_factory.mktemp("native"))
    server = type(shared)(lambda: Engine.load(threads=1), settings)
    yield server.ready()
    server.close()


def asked(server: Any, **body: Any) -> Any:
    answer = server.client.post("/completion", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(server: Any, **body: Any) -> list[dict[str, Any]]:
    text = server.client.post("/completion", json=body | {"stream": True}).text
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]


def refused(server: Any, **body: Any) -> tuple[int, str, str]:
    answer = server.client.post("/completion", json={"prompt": "x"} | body)
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


def test_completion_reports_stop_type_counts_and_settings(served: Any) -> None:
    answer = asked(served, **GREEDY, n_predict=8, return_tokens=True)
    assert (answer["stop"], answer["stop_type"], answer["stopping_word"]) == (True, "limit", "")
    assert answer["tokens_predicted"] == answer["timings"]["predicted_n"] == len(answer["tokens"]) == 8
    assert served.client.post("/detokenize", json={"tokens": answer["tokens"]}).json()["content"] == answer["content"]
    assert answer["prompt"] == GREEDY["prompt"] and not answer["truncated"]
    assert answer["has_new_line"] == ("\n" in answer["content"])
    settings = answer["generation_settings"]
    assert (settings["n_predict"], settings["temperature"], settings["ignore_eos"]) == (8, 0, True)
    assert asked(served, **GREEDY, n_predict=2)["tokens"] == []


def test_stream_matches_whole_completion(served: Any) -> None:
    whole = asked(served, **GREEDY, n_predict=12, return_tokens=True)
    *pieces, last = streamed(served, **GREEDY, n_predict=12)
    assert "".join(piece["content"] for piece in pieces) == whole["content"] and last["content"] == ""
    assert [token for piece in pieces for token in piece["tokens"]] == whole["tokens"]
    assert not any(piece["stop"] for piece in pieces) and last["stop"]
    alike = ("stop_type", "tokens_predicted", "tokens_evaluated", "prompt", "truncated", "has_new_line")
    assert {name: last[name] for name in alike} == {name: whole[name] for name in alike}


def test_equivalent_prompt_forms_return_same_completion(served: Any) -> None:
    ids = served.client.post("/tokenize", json={"content": "SmolLM3 is"}).json()["tokens"]
    forms = [ids, "SmolLM3 is", {"prompt_string": "SmolLM3 is"}, [*ids[:1], served_text(served, ids[1:])]]
    answers = asked(served, prompt=forms, temperature=0, n_predict=5)
    assert [answer["index"] for answer in answers] == [0, 1, 2, 3]
    assert len({answer["content"] for answer in answers}) == 1
    assert asked(served, prompt=ids, temperature=0, n_predict=5)["content"] == answers[0]["content"]
    assert len(asked(served, prompt="x", n_cmpl=2, n_predict=1)) == 2


def served_text(server: Any, ids: list[int]) -> str:
    content = server.client.post("/detokenize", json={"tokens": ids}).json()["content"]
    assert isinstance(content, str)
    return content


def test_special_tokens_in_prompt_are_parsed(served: Any) -> None:
    read = asked(served, prompt="<|im_start|>user\nHi<|im_end|>\n", n_predict=0)
    special = served.client.post("/tokenize", json={"content": read["prompt"], "parse_special": True}).json()["tokens"]
    assert read["tokens_evaluated"] == len(special) and read["content"] == ""


def test_n_probs_returns_token_ids_and_top_logprobs(served: Any) -> None:
    answer = asked(served, **GREEDY, n_predict=3, n_probs=4, return_tokens=True)
    told = answer["completion_probabilities"]
    assert [each["id"] for each in told] == answer["tokens"]
    assert all(len(each["top_logprobs"]) == 4 for each in told)
    spelt = {(other["id"], other["token"]) for each in told for other in each["top_logprobs"]}
    assert all(served_text(served, [token]) == text for token, text in spelt)
    pieces = [piece for piece in streamed(served, **GREEDY, n_predict=3, n_probs=4) if not piece["stop"]]
    assert [each for piece in pieces for each in piece["completion_probabilities"]] == told


@pytest.mark.parametrize("form", [list, dict])
def test_logit_bias_accepts_token_ids_and_texts(served: Any, form: Any) -> None:
    first = asked(served, **GREEDY, n_predict=1, return_tokens=True)
    for name in (first["tokens"][0], first["content"]):
        pairs = [[name, False]]
        bias: Any = pairs if form is list else {str(key): value for key, value in pairs}
        answer = asked(served, **GREEDY, n_predict=1, return_tokens=True, logit_bias=bias)
        assert answer["tokens"] != first["tokens"]
        assert answer["generation_settings"]["logit_bias"][0] == {"token": first["tokens"][0], "bias": -100}


def test_response_fields_selects_returned_fields(served: Any) -> None:
    fields = ["content", "generation_settings/n_predict", "prompt", "nothing"]
    answer = asked(served, **GREEDY, n_predict=3, response_fields=fields)
    assert answer.keys() == {"content", "generation_settings/n_predict", "prompt"}
    assert answer["generation_settings/n_predict"] == 3


def test_full_context_sets_truncated(start: Start) -> None:
    server = start(lambda: Engine.load(threads=1, context_tokens=64)).ready()
    answer = asked(server, **GREEDY)
    assert answer["truncated"] and answer["tokens_evaluated"] + answer["tokens_predicted"] >= 64


def test_natural_end_sets_stop_type_eos(start: Start) -> None:
    def script(messages: list[Message], thinking: bool) -> list[Event]:
        return say("as it was")

    server = start(ScriptedEngine(script)).ready()
    assert asked(server, prompt="x")["stop_type"] == "eos"


def test_stop_string_is_reported_as_stopping_word(served: Any) -> None:
    text = asked(served, **GREEDY, n_predict=16)["content"]
    word = text.strip()[3:6]
    answer = asked(served, **GREEDY, n_predict=16, stop=[word])
    assert (answer["stop_type"], answer["stopping_word"]) == ("word", word) and word not in answer["content"]


def test_progress_and_timings_are_streamed_on_request(served: Any) -> None:
    prompt = "A long prompt that nobody has sent before. " * 40
    events = streamed(served, prompt=prompt, n_predict=3, return_progress=True, timings_per_token=True)
    progress = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    assert progress and progress[-1]["processed"] == progress[-1]["total"] == events[-1]["tokens_evaluated"]
    assert all("timings" in event for event in events if event["content"])


REFUSED = [
    ({"prompt": ""}, "empty_prompt", "prompt"),
    ({"prompt": []}, "empty_prompt", "prompt"),
    ({"prompt": {"prompt_string": "x", "multimodal_data": ["x"]}}, "unsupported_parameter", "prompt.multimodal_data"),
    ({"prompt": [10**6]}, "invalid_value", "prompt"),
    ({"prompt": ["x"] * 65}, "invalid_value", "prompt"),
    ({"prompt": [1, *["x"] * 1025]}, "invalid_value", "prompt"),
    ({"post_sampling_probs": True}, "unsupported_parameter", "post_sampling_probs"),
    ({"mirostat": 2}, "unsupported_parameter", "mirostat"),
    ({"lora": [{"id": 0, "scale": 1}]}, "unsupported_parameter", "lora"),
    ({"t_max_predict_ms": 5}, "unsupported_parameter", "t_max_predict_ms"),
    ({"n_predict": 4, "max_tokens": 5}, "invalid_value", "max_tokens"),
    ({"n_predict": -3}, "invalid_value", "n_predict"),
    ({"n_probs": 21}, "invalid_value", "n_probs"),
    ({"n_cmpl": 65}, "invalid_value", "n_cmpl"),
    ({"logit_bias": [[10**6, 1]]}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"9" * 9: 1}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "invalid_value", "logit_bias"),
    ({"logit_bias": [[5, 101]]}, "invalid_value", "logit_bias"),
    ({"logit_bias": [[5, True]]}, "invalid_value", "logit_bias"),
    ({"typical": 0.5}, "unsupported_parameter", "typical"),
    ({"response_format": {"type": "json_object"}}, "unsupported_parameter", "response_format"),
]


@pytest.mark.parametrize(("body", "code", "param"), REFUSED, ids=lambda value: str(value)[:30])
def test_invalid_field_is_rejected_by_name(served: Any, body: dict[str, Any], code: str, param: str) -> None:
    status, told, where = refused(served, **body)
    assert (status, told) == (400, code) and where.startswith(param)


def test_disabled_fields_and_hints_are_accepted() -> None:
    off = {"top_n_sigma": -1.0, "adaptive_target": -1.0, "t_max_predict_ms": 0, "n_indent": 0, "min_keep": 0}
    off |= {"response_format": {"type": "text"}}
    hints = {"id_slot": 2, "n_keep": 5, "speculative.n_max": 8, "backend_sampling": True}
    asked = parse_native_request({"prompt": "x", "seed": -1, "n_predict": -1} | off | hints)
    assert [hint.name for hint in asked.hints] == list(hints)
    assert asked.params[0].seed is None and asked.params[0].max_tokens is None


def test_text_logit_bias_applies_to_its_tokens() -> None:
    asked = parse_native_request({"prompt": [7, "ab"], "logit_bias": [["xy", -2], [5, False]]})
    ready = tokenize_request(asked, lambda text: [ord(each) for each in text], lambda ids: "".join(map(chr, ids)))
    assert ready.prompts == ((7, 97, 98),) and ready.texts == ("\x07ab",)
    assert ready.params[0].logit_bias == {120: -2.0, 121: -2.0, 5: -100.0}
