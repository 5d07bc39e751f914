"""Synthetic files have the official shapes, valid weights and a working tokenizer, and depend only on the seed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from smollm3.conversion.hf_folder_of import PRE_TOKENIZER

from notso.qtensor.errors import GGUFError
from notso.qtensor.formats import Q4_K, Q6_K, row_bytes
from notso.qtensor.gguf import GGUFFile
from notso.smollm3.diagnostics import synth
from notso.smollm3.diagnostics.synth import (
    CHUNK_BYTES,
    SyntheticShape,
    has_more_bits,
    synthetic_tensors,
    write_synthetic,
)
from notso.smollm3.errors import InvalidRequestError, ModelFileError
from notso.smollm3.text.tokenizer import Tokenizer
from notso.smollm3.text.vocabulary import BYTE_CHARACTERS

SMALL = {"layers": 4, "hidden": 256, "ffn": 512, "heads": 4, "kv_heads": 1, "vocab": 300}
SPECIALS = {"<|im_start|>": 3, "<|im_end|>": 3, "<think>": 4, "</think>": 4, "<|reserved_special_token_1|>": 3}


@pytest.fixture(scope="module")
def words() -> dict[str, Any]:
    """Return the smallest byte-level tokenizer: 256 bytes, two merges and a few special tokens."""
    tokens = [*BYTE_CHARACTERS, "he", "hel", *SPECIALS]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smaug-bpe",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 258 + list(SPECIALS.values()),
        "tokenizer.ggml.merges": ["h e", "he l"],
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.chat_template": "{{ messages }}",
    }


def total_bytes(tensors: list[tuple[str, tuple[int, ...], Any]]) -> int:
    return sum(int(np.prod(shape[:-1])) * row_bytes(format, shape[-1]) for _, shape, format in tensors)


def test_full_size_equals_the_official_file_size() -> None:
    tensors = synthetic_tensors(SyntheticShape())
    assert Counter(format.name for _, _, format in tensors) == {"Q4_K": 216, "Q6_K": 37, "F32": 73}
    assert len({name for name, _, _ in tensors}) == len(tensors) == 326
    assert total_bytes(tensors) == 1_907_462_144
    by_name = {name: (shape, format) for name, shape, format in tensors}
    assert by_name["token_embd.weight"] == ((128256, 2048), Q6_K)
    assert by_name["blk.5.attn_k.weight"] == ((512, 2048), Q4_K)
    assert by_name["blk.35.ffn_down.weight"] == ((2048, 11008), Q6_K)


@pytest.mark.parametrize(
    ("formats", "size"),
    [("Q8_0", 3_267_731_456), ("Q6_K", 2_523_017_216), ("BF16", 6_150_496_256), ("F16", 6_150_496_256)],
)
def test_other_formats_equal_the_published_file_sizes(formats: str, size: int) -> None:
    assert total_bytes(synthetic_tensors(SyntheticShape(), formats)) == size


def test_layers_with_more_bits_match_the_official_file() -> None:
    official = [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 30, 31, 32, 33, 34, 35]
    assert [i for i in range(36) if has_more_bits(i, 36)] == official


def test_small_synthetic_file_is_complete_and_valid(tmp_path: Path, words: dict[str, Any]) -> None:
    path, calls = tmp_path / "small.gguf", []
    size = write_synthetic(path, **SMALL, tokenizer=words, progress=lambda done, total: calls.append((done, total)))
    with GGUFFile.open(path) as file:
        assert sum(t.nbytes for t in file.tensors.values()) == size
        assert [(t.name, t.shape, t.format) for t in file.tensors.values()] == synthetic_tensors(
            SyntheticShape(**SMALL)
        )
        for tensor in file.tensors.values():
            numbers = tensor.dequantize()
            assert np.isfinite(numbers).all()
            if len(tensor.shape) == 1:
                assert numbers.mean() == pytest.approx(1, abs=0.05)
            else:
                assert numbers.std() == pytest.approx(0.02 * (2048 / 256) ** 0.5, rel=0.2)
                assert abs(numbers.mean()) < 0.01
        assert file.metadata["smollm3.attention.head_count_kv"] == 1
        assert file.metadata["smollm3.rope.dimension_count"] == 64
        assert file.metadata["general.file_type"] == 15
        assert file.metadata["tokenizer.chat_template"] == "{{ messages }}"
    assert calls == sorted(calls) and calls[-1] == (size, size)


def test_synthetic_tokenizer_works_and_is_padded(tmp_path: Path, words: dict[str, Any]) -> None:
    path = tmp_path / "small.gguf"
    write_synthetic(path, **SMALL, tokenizer=words, template="other")
    with GGUFFile.open(path) as file:
        metadata = file.metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    assert len(tokens) == len(set(tokens)) == 300
    assert tokens[:263] == words["tokenizer.ggml.tokens"] and tokens[263:265] == [
        "<|reserved_special_token_0|>",
        "<|reserved_special_token_2|>",
    ]
    assert set(metadata["tokenizer.ggml.token_type"][263:]) == {3}
    assert metadata["tokenizer.chat_template"] == "other"
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.vocab_size == 300
    assert tokenizer.decode(tokenizer.encode("hello, grüße")) == "hello, grüße"


def test_gguf_file_can_provide_the_tokenizer(tmp_path: Path, words: dict[str, Any]) -> None:
    first, second, third = (tmp_path / f"{n}.gguf" for n in "123")
    write_synthetic(first, **SMALL, tokenizer=words)
    write_synthetic(second, **SMALL, tokenizer=first)
    with GGUFFile.open(first) as file:
        write_synthetic(third, **SMALL, tokenizer=file)
    assert first.read_bytes() == second.read_bytes() == third.read_bytes()


def test_tokenizer_json_can_provide_the_tokenizer(tmp_path: Path, words: dict[str, Any]) -> None:
    tokens = words["tokenizer.ggml.tokens"]
    added = [{"id": i, "content": t, "special": SPECIALS[t] == 3} for i, t in enumerate(tokens) if t in SPECIALS]
    content = {
        "added_tokens": added,
        "pre_tokenizer": PRE_TOKENIZER,
        "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": {t: i for i, t in enumerate(tokens[:258])}, "merges": [["h", "e"], "he l"]},
    }
    (tmp_path / "words.json").write_text(json.dumps(content))
    (tmp_path / "chat_template.jinja").write_text("beside")
    write_synthetic(tmp_path / "a.gguf", **SMALL, tokenizer=tmp_path / "words.json")
    with GGUFFile.open(tmp_path / "a.gguf") as file:
        metadata = dict(file.metadata)
    for key in ("tokens", "token_type", "merges", "eos_token_id"):
        length = len(tokens) if key in ("tokens", "token_type") else None
        got = metadata[f"tokenizer.ggml.{key}"]
        assert (got[:length] if length else got) == words[f"tokenizer.ggml.{key}"]
    assert metadata["tokenizer.chat_template"] == "beside"


def test_demo_model_is_the_default_tokenizer(
    tmp_path: Path, words: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synth, "demo_path", lambda: tmp_path / "demo.gguf")
    with pytest.raises(InvalidRequestError, match="demo model is missing"):
        write_synthetic(tmp_path / "a.gguf", **SMALL)
    write_synthetic(tmp_path / "demo.gguf", **SMALL, tokenizer=words, template="the demo's")
    write_synthetic(tmp_path / "a.gguf", **SMALL)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "demo.gguf").read_bytes()
    bare = {key: value for key, value in words.items() if key != "tokenizer.chat_template"}
    write_synthetic(tmp_path / "b.gguf", **SMALL, tokenizer=bare)
    assert GGUFFile.open(tmp_path / "b.gguf").metadata["tokenizer.chat_template"] == "the demo's"


def test_file_content_depends_only_on_the_seed(tmp_path: Path, words: dict[str, Any]) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_synthetic(tmp_path / name, **SMALL, tokenizer=words, seed=seed)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() != (tmp_path / "c").read_bytes()


def test_tensors_larger_than_a_chunk_do_not_repeat(tmp_path: Path, words: dict[str, Any]) -> None:
    sizes = SMALL | {"layers": 1, "vocab": CHUNK_BYTES // 210 + 500}
    write_synthetic(tmp_path / "a", **sizes, tokenizer=words)
    with GGUFFile.open(tmp_path / "a") as file:
        rows = file.tensors["token_embd.weight"].row_data()
        assert len(np.unique(rows[:500], axis=0)) == 500
        assert not (rows[:500] == rows[-500:]).all(axis=1).any()


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"layers": 0}, "layers"),
        ({"layers": 257}, "layers"),
        ({"hidden": 200}, "hidden"),
        ({"hidden": -256}, "hidden"),
        ({"ffn": 300}, "ffn"),
        ({"heads": 3}, "heads"),
        ({"heads": 256}, "heads"),
        ({"kv_heads": 3}, "kv_heads"),
        ({"kv_heads": 8}, "kv_heads"),
        ({"vocab": 262}, "vocab"),
        ({"vocab": 1_000_001}, "vocab"),
        ({"formats": "Q7_K"}, "formats"),
        ({"formats": "Q8_0", "ffn": 500}, "ffn"),
    ],
)
def test_invalid_sizes_are_refused_by_name(
    tmp_path: Path, words: dict[str, Any], change: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        write_synthetic(tmp_path / "a", **(SMALL | change), tokenizer=words)
    assert caught.value.param == param and "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"model": {"vocab": {"a": 5}, "merges": []}, "added_tokens": []}', '{"model": 3}']
)
def test_invalid_tokenizer_json_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "words.json").write_text(content)
    with pytest.raises(ModelFileError):
        write_synthetic(tmp_path / "a", **SMALL, tokenizer=tmp_path / "words.json", template="x")


def test_missing_or_unusable_tokenizer_is_refused(tmp_path: Path, words: dict[str, Any]) -> None:
    for source, error in (
        (tmp_path / "none.json", ModelFileError),
        (tmp_path / "none.gguf", GGUFError),
        ({}, ModelFileError),
        (words | {"tokenizer.ggml.token_type": [1]}, ModelFileError),
    ):
        with pytest.raises(error):
            write_synthetic(tmp_path / "a", **SMALL, tokenizer=source)


@pytest.mark.parametrize(
    "value",
    [None, "8", True, 1.5, 10**5000, float("nan")],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("name", ["layers", "hidden", "ffn", "heads", "kv_heads", "vocab"])
def test_shape_of_wrong_type_is_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name} must be a whole number from 1 to") as caught:
        SyntheticShape(**{name: value})
    assert caught.value.param == name


def test_shape_accepts_integers_of_numpy() -> None:
    shape = SyntheticShape(hidden=np.int64(2048), heads=np.uint8(16), kv_heads=np.uint8(4))
    assert shape == SyntheticShape() and shape.kv_width == 512
