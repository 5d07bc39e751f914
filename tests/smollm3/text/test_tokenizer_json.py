"""A tokenizer.json next to the model takes precedence if it matches the model; otherwise, it is rejected."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from notso.smollm3.errors import ModelFileError
from notso.smollm3.text.tokenizer import Tokenizer


def _write(folder: Path, data: object) -> Path:
    (folder / "tokenizer.json").write_text(data if isinstance(data, str) else json.dumps(data))
    return folder / "model.gguf"


def test_tokenizer_json_next_to_the_model_takes_precedence(
    tmp_path: Path, small_json: dict[str, Any], small_metadata: dict[str, Any], small_tokenizer: Tokenizer
) -> None:
    same = Tokenizer.from_gguf(small_metadata, _write(tmp_path, small_json))
    text = "def encode(self, text): return <think> 12345 Grüße"
    assert same.encode(text) == small_tokenizer.encode(text)
    assert same.encode(text, control=True) == small_tokenizer.encode(text, control=True)
    model = {**small_json["model"], "merges": [], "ignore_merges": False}
    bytewise = Tokenizer.from_gguf(small_metadata, _write(tmp_path, {**small_json, "model": model}))
    assert len(bytewise.encode(text)) == len(text.encode())
    model = {**small_json["model"], "merges": [" ".join(merge) for merge in small_json["model"]["merges"]]}
    older = Tokenizer.from_gguf(small_metadata, _write(tmp_path, {**small_json, "model": model}))
    assert older.encode(text) == small_tokenizer.encode(text)


def test_missing_tokenizer_json_falls_back_to_gguf_merges(tmp_path: Path, small_metadata: dict[str, Any]) -> None:
    assert Tokenizer.from_gguf(small_metadata, tmp_path / "model.gguf").encode("return")


def _without(data: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in data.items() if key != name}


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda d: "{", "tokenizer.json does not match the model file next to it"),
        (lambda d: "[]", "not a byte-level BPE tokenizer.json"),
        (lambda d: "[" * 100_000, "does not match"),
        (lambda d: _without(d, "model"), "there is no model"),
        (lambda d: _without(d, "added_tokens"), "added_tokens must be a list"),
        (lambda d: {**d, "normalizer": {"type": "Strip"}}, "its normalizer 'Strip' is not supported"),
        (
            lambda d: {**d, "pre_tokenizer": {"type": "ByteLevel"}},
            "its pre_tokenizer 'ByteLevel' is not supported with",
        ),
        (lambda d: json.dumps(d).replace(r"\\p{N}{1,3}", "(a+)+$"), "which is not a supported expression"),
        (lambda d: {**d, "model": {**d["model"], "type": "Unigram"}}, "its model is 'Unigram', not BPE"),
        (lambda d: {**d, "model": {**d["model"], "dropout": 0.1}}, "not plain BPE"),
        (
            lambda d: {**d, "model": {**d["model"], "vocab": {**d["model"]["vocab"], "€": 1200}}},
            "token '€' has id 1200",
        ),
        (lambda d: {**d, "model": {**d["model"], "vocab": _without(d["model"]["vocab"], "!")}}, "'!' has id None"),
        (lambda d: {**d, "added_tokens": d["added_tokens"][1:]}, "'<|begin_of_text|>' has id"),
        (lambda d: {**d, "model": {**d["model"], "merges": [["q", "zzz"]]}}, "does not match"),
        (lambda d: {**d, "model": {**d["model"], "merges": [1]}}, "TypeError"),
    ],
)
def test_mismatched_tokenizer_json_is_refused(
    tmp_path: Path,
    small_json: dict[str, Any],
    small_metadata: dict[str, Any],
    edit: Callable[[dict[str, Any]], object],
    said: str,
) -> None:
    path = _write(tmp_path, edit(small_json))
    with pytest.raises(ModelFileError) as raised:
        Tokenizer.from_gguf(small_metadata, path)
    assert said in str(raised.value)


def test_unreadable_tokenizer_json_is_refused(tmp_path: Path, small_metadata: dict[str, Any]) -> None:
    (tmp_path / "tokenizer.json").symlink_to("a" * 300)
    with pytest.raises(ModelFileError, match="File name too long"):
        Tokenizer.from_gguf(small_metadata, tmp_path / "model.gguf")


def test_too_large_tokenizer_json_is_refused(
    tmp_path: Path, small_metadata: dict[str, Any], monkeypatch: pytest.MonkeyPatch, small_json: dict[str, Any]
) -> None:
    monkeypatch.setattr("notso.smollm3.text.tokenizer.MAX_TOKENIZER_JSON_BYTES", 1000)
    with pytest.raises(ModelFileError, match="larger than 1000 bytes"):
        Tokenizer.from_gguf(small_metadata, _write(tmp_path, small_json))
