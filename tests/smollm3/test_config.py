"""Configuration from metadata: values that are read or derived, and errors that name the key."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden.random_models import RANDOM
from golden.store import FOLDER

from notso.qtensor.gguf import GGUFFile
from notso.smollm3.config import LIMITS, SmolLM3Config
from notso.smollm3.errors import ModelFileError
from notso.smollm3.hub.registry import demo_path

OFFICIAL: dict[str, Any] = {
    "general.architecture": "smollm3",
    "smollm3.block_count": 36,
    "smollm3.context_length": 65536,
    "smollm3.embedding_length": 2048,
    "smollm3.feed_forward_length": 11008,
    "smollm3.attention.head_count": 16,
    "smollm3.attention.head_count_kv": 4,
    "smollm3.rope.freq_base": 5_000_000.0,
    "smollm3.rope.dimension_count": 128,
    "smollm3.attention.layer_norm_rms_epsilon": 1e-6,
    "smollm3.vocab_size": 128256,
    "tokenizer.ggml.tokens": ["x"] * 128256,
}
"""Metadata of the official files."""

REQUIRED = (
    "general.architecture",
    "smollm3.block_count",
    "smollm3.context_length",
    "smollm3.embedding_length",
    "smollm3.feed_forward_length",
    "smollm3.attention.head_count",
    "smollm3.rope.freq_base",
    "smollm3.attention.layer_norm_rms_epsilon",
    "tokenizer.ggml.tokens",
)


def read(**changes: Any) -> SmolLM3Config:
    """Return the configuration of the official metadata with changed keys (`__` for dots), without those set to
    None."""
    changed = OFFICIAL | {key.replace("__", "."): value for key, value in changes.items()}
    return SmolLM3Config.from_metadata({key: value for key, value in changed.items() if value is not None})


def test_official_metadata_gives_the_expected_configuration() -> None:
    config = read()
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (2048, 11008, 36)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (16, 4, 128)
    assert (config.vocab_size, config.max_position_embeddings) == (128256, 65536)
    assert (config.rope_theta, config.rms_norm_eps) == (5e6, 1e-6)
    assert config.kv_values_per_token == 36_864


def test_every_fourth_layer_has_no_rope() -> None:
    config = read()
    assert config.nope_layers == (3, 7, 11, 15, 19, 23, 27, 31, 35)
    assert config.no_rope_layers == (1, 1, 1, 0) * 9
    assert [config.uses_rope(layer) for layer in range(4)] == [True, True, True, False]
    assert read(smollm3__block_count=6).no_rope_layers == (1, 1, 1, 0, 1, 1)


def test_demo_and_random_model_configurations_are_read(random_file: Path) -> None:
    with GGUFFile.open(random_file) as file:
        config = SmolLM3Config.from_metadata(file.metadata)
    assert config.head_dim == RANDOM.head_dim != config.hidden_size // config.num_attention_heads
    assert config.vocab_size == RANDOM.vocab
    with GGUFFile.open(demo_path()) as file:
        demo = SmolLM3Config.from_metadata(file.metadata)
    assert demo.head_dim == demo.hidden_size // demo.num_attention_heads
    assert demo.num_attention_heads == 4 * demo.num_key_value_heads
    assert 3 in demo.nope_layers


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(ModelFileError, match=re.escape(key)):
        SmolLM3Config.from_metadata({name: value for name, value in OFFICIAL.items() if name != key})


@pytest.mark.parametrize("key", LIMITS)
@pytest.mark.parametrize("value", [0, -1, 1 << 31, 16.0, "16", True, [16], math.nan], ids=repr)
def test_invalid_integer_is_refused_by_key(key: str, value: Any) -> None:
    with pytest.raises(ModelFileError, match=re.escape(f"smollm3.{key}")):
        SmolLM3Config.from_metadata(OFFICIAL | {f"smollm3.{key}": value})


@pytest.mark.parametrize("key", ["rope.freq_base", "attention.layer_norm_rms_epsilon"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, "1", True, None], ids=repr)
def test_invalid_float_is_refused_by_key(key: str, value: Any) -> None:
    with pytest.raises(ModelFileError, match=re.escape(key)):
        SmolLM3Config.from_metadata(OFFICIAL | {f"smollm3.{key}": value})


@pytest.mark.parametrize("architecture", ["smollm3", None], ids=["the first part", "another part"])
def test_parts_of_a_split_model_are_refused_by_name(architecture: str | None) -> None:
    assert read(split__count=1, split__no=0) == read()
    with pytest.raises(ModelFileError, match="it is one of 3 parts of a model; merge them with llama-gguf-split"):
        read(split__count=3, split__no=1, general__architecture=architecture)


YARN = {"smollm3__rope__scaling__type": "yarn", "smollm3__rope__scaling__factor": 2.0}


def test_yarn_of_the_file_applies_to_every_context_length() -> None:
    """As in the model card for 128K: frequencies for the longer context apply at all lengths, and only once."""
    stretched = {"smollm3__context_length": 131_072, "smollm3__rope__scaling__original_context_length": 65_536}
    neutral = {"smollm3__rope__scaling__attn_factor": 1.0, "smollm3__rope__scaling__finetuned": True}
    of_file, plain = read(**YARN, **stretched, **neutral), read()

    assert of_file.yarn_of_file == (2.0, 65_536)
    for context_tokens in (16, 8_192, 131_072):
        assert of_file.rope_frequencies(context_tokens) == plain.rope_frequencies(131_072)
    assert plain.rope_frequencies(65_536) != plain.rope_frequencies(131_072)
    assert of_file.max_context_tokens == plain.max_context_tokens == 131_072
    assert read(**YARN).yarn_of_file == (2.0, 65_536)  # the default is the file's context
    assert read(smollm3__rope__scaling__type="none") == plain


@pytest.mark.parametrize("architecture", ["llama", "SmolLM3", 3, "x" * 500])
def test_unsupported_architecture_is_refused(architecture: Any) -> None:
    with pytest.raises(ModelFileError, match="supported: 'smollm3'") as caught:
        read(general__architecture=architecture)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"smollm3__attention__head_count_kv": 3}, "16 attention heads cannot share 3"),
        ({"smollm3__embedding_length": 2000}, "head dimension of 125"),
        ({"smollm3__attention__value_length": 64}, "value_length differs from the head dimension 128"),
        ({"smollm3__rope__dimension_count": 64}, "dimension_count differs from the head dimension 128"),
        (
            {"smollm3__rope__scaling__type": "linear"},
            "scaling.type' is 'linear'; the only supported RoPE scaling is YaRN",
        ),
        ({"smollm3__rope__scale_linear": 4.0}, "rope.scale_linear is 4.0; the only supported RoPE scaling is YaRN"),
        ({"smollm3__rope__scaling__factor": 2.0}, "scaling.factor' is 2.0; the only supported RoPE scaling is YaRN"),
        ({"smollm3__rope__scaling__type": "yarn"}, "rope.scaling.factor must be a number"),
        (YARN | {"smollm3__rope__scaling__attn_factor": 0.0}, "rope.scaling.attn_factor must be a number from 0.001"),
        (YARN | {"smollm3__rope__scaling__yarn_ext_factor": 0.5}, "scaling.yarn_ext_factor' is 0.5"),
        (YARN | {"smollm3__rope__scaling__yarn_truncate": 1}, "rope.scaling.yarn_truncate must be true or false"),
        (YARN | {"smollm3__rope__scaling__original_context_length": 0}, "original_context_length must be an integer"),
        ({"smollm3__vocab_size": 128255}, "vocab_size differs from the 128256 tokens"),
        ({"tokenizer__ggml__tokens": []}, "tokenizer.ggml.tokens"),
    ],
)
def test_inconsistent_metadata_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelFileError, match=said):
        read(**changes)


def test_optional_keys_may_be_omitted() -> None:
    assert read(smollm3__attention__head_count_kv=None).num_key_value_heads == 16
    assert read(smollm3__vocab_size=None).vocab_size == 128256
    assert read(smollm3__rope__dimension_count=None).head_dim == 128
    assert read(general__name="x", smollm3__whatever=3, quantize__imatrix__file="y") == read()


def test_head_dimension_can_be_set_explicitly() -> None:
    keys = {f"smollm3__{key}": 64 for key in ("attention__key_length", "attention__value_length")}
    assert read(**keys, smollm3__rope__dimension_count=64).head_dim == 64


# ---------------------------------------------------------------- rotary positions


def test_rope_frequencies_are_plain_within_the_trained_context() -> None:
    config = read()
    for context in (1, 4096, 65536):
        frequencies, factor = config.rope_frequencies(context)
        assert factor == 1.0
        np.testing.assert_allclose(frequencies, 5e6 ** (-np.arange(64) / 64), rtol=1e-12)


def test_yarn_frequencies_match_transformers() -> None:
    """`golden/rope_of_the_3b.npz` contains transformers' inv_freq and attention factor for the 3B."""
    with np.load(FOLDER / "rope_of_the_3b.npz", allow_pickle=False) as kept:
        frequencies, factor = read().rope_frequencies(131_072)
        np.testing.assert_allclose(frequencies, kept["yarn"], rtol=2e-6)
        assert factor == pytest.approx(float(kept["yarn_factor"]), abs=1e-9)
        plain, one = read().rope_frequencies(65_536)
        np.testing.assert_allclose(plain, kept["plain"], rtol=2e-6)
        assert one == float(kept["plain_factor"]) == 1.0


def test_yarn_keeps_fast_pairs_and_halves_slow_ones() -> None:
    """Interpolation covers pairs 24 to 39 of 64."""
    config = read()
    plain, _ = config.rope_frequencies(65_536)
    yarn, factor = config.rope_frequencies(65_537)
    ratio = np.array(yarn) / np.array(plain)
    assert (ratio[:25] == 1.0).all()
    np.testing.assert_allclose(ratio[39:], 0.5, rtol=1e-15)
    np.testing.assert_allclose(ratio[24:40], 1 - 0.5 * np.arange(16) / 15, rtol=1e-12)
    assert factor == pytest.approx(1.0693147, abs=1e-7)
