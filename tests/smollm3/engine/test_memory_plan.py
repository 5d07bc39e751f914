"""The engine's plan for available memory: context, cache format, sequences and tiles."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from golden.random_models import RandomModel
from hypothesis import given
from hypothesis import strategies as st
from smollm3.conversion.hf_folder_of import write_folder

from notso.qtensor import TILE_POSITIONS, kv_block_bytes
from notso.smollm3 import Engine
from notso.smollm3.config import SmolLM3Config
from notso.smollm3.conversion.converter import convert
from notso.smollm3.engine.memory_plan import (
    BLOCK_TOKENS,
    CONTEXT_FLOOR_TOKENS,
    OWN_BYTES,
    PROCESS_BYTES,
    SHARED_TOKENS,
    STEP_WINDOW_BLOCKS,
    WINDOW_BLOCKS,
    EnginePlan,
    kv_bytes_per_token,
    largest_context,
    plan_engine,
    scratch_bytes,
)
from notso.smollm3.errors import InvalidRequestError, OutOfMemoryError
from notso.smollm3.kv.kv_cache import KV_FORMATS, KVFormat
from notso.smollm3.values.engine_config import KV_CHOICES, EngineConfig, KVChoice
from notso.system.memory import MIB, MemoryLimit

SMALL = RandomModel(layers=2, hidden=256, ffn=256, heads=2, kv_heads=1, head_dim=128, vocab=400)
WEIGHTS = 1_907_462_144  # SmolLM3-3B in Q4_K_M
SMOLLM3_3B = SmolLM3Config(
    hidden_size=2048,
    intermediate_size=11008,
    num_hidden_layers=36,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=128,
    vocab_size=128256,
    max_position_embeddings=65536,
    rms_norm_eps=1e-6,
    rope_theta=5e6,
    no_rope_layers=(1, 1, 1, 0) * 9,
)


def plan(gib: float, *, fine_weights: bool = False, stored: KVFormat | None = None, **settings: Any) -> EnginePlan:
    """Return the plan for the 3B with `gib` of available memory."""
    config = EngineConfig.from_dict(settings)
    return plan_engine(SMOLLM3_3B, WEIGHTS, config, limit(gib), fine_weights=fine_weights, stored=stored)


def limit(gib: float) -> MemoryLimit:
    return MemoryLimit("the system", int(gib * 1024 * MIB))


@pytest.mark.parametrize(
    ("kv_format", "bits"), [("f16", 16), ("k8v8", 8.125), ("k8v4", 6.125), ("k4v4", 4.125), ("k4v3", 3.625)]
)
def test_kv_bytes_per_token_include_scales(kv_format: KVFormat, bits: float) -> None:
    assert kv_bytes_per_token(SMOLLM3_3B, kv_format) == SMOLLM3_3B.kv_values_per_token * bits / 8


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("head_dim", [16, 48, 128])
def test_kv_block_size_matches_the_cache_layout(kv_format: KVFormat, head_dim: int) -> None:
    config = dataclasses.replace(SMOLLM3_3B, head_dim=head_dim, num_hidden_layers=1)

    assert BLOCK_TOKENS == TILE_POSITIONS
    assert BLOCK_TOKENS * kv_bytes_per_token(config, kv_format) == kv_block_bytes(kv_format, 4, head_dim)


@pytest.mark.parametrize(
    ("context", "kv_format"),
    [(None, "k8v8"), (32_768, "k8v8"), (32_769, "k8v4"), (65_536, "k8v4"), (131_072, "k8v4")],
)
def test_kv_format_depends_on_context_if_memory_is_ample(context: int | None, kv_format: KVFormat) -> None:
    made = plan(64, context_tokens=context)

    assert (made.kv_format, made.context_tokens, made.max_num_seqs) == (kv_format, context or 8192, 16)
    assert not made.reduced


def test_kv_format_shrinks_with_available_memory() -> None:
    found = {gib: plan(gib, context_tokens=131_072).kv_format for gib in (8.0, 5.7, 5.0, 4.6, 4.3)}

    assert found == {8.0: "k8v4", 5.7: "k8v4", 5.0: "k4v4", 4.6: "k4v4", 4.3: "k4v3"}


def test_requested_32k_context_uses_smaller_kv_format_if_needed() -> None:
    assert plan(3.2, context_tokens=32_768).kv_format == "k8v4"


def test_64k_and_128k_contexts_of_the_3b_fit_into_4_gib() -> None:
    """Weights and cache alone; the plan also adds the memory of the process itself."""
    long = plan(64, context_tokens=65_536, kv="k8v4", max_num_seqs=1)
    longest = plan(64, context_tokens=131_072, kv="k4v3", max_num_seqs=1)

    assert long.weights_bytes + long.kv_bytes < 4.0e9 - 100e6
    assert longest.weights_bytes + longest.kv_bytes < (4 << 30) - 150e6


@pytest.mark.parametrize("own", [0, 50 * MIB, OWN_BYTES])
def test_memory_that_the_process_holds_already_is_counted_once(own: int) -> None:
    """A server holds more memory when it loads the model than when it starts, but both plans are equal."""
    total = int(2.6 * 1024 * MIB)
    plans = {
        plan_engine(SMOLLM3_3B, WEIGHTS, EngineConfig(), MemoryLimit("a limit", total - held, held))
        for held in (0, own)
    }
    assert len(plans) == 1


def test_only_usual_memory_of_the_process_is_counted_as_its_part_of_the_plan() -> None:
    def planned(own: int, **settings: Any) -> EnginePlan:
        given = MemoryLimit("a limit", int(2.6 * 1024 * MIB), own)
        return plan_engine(SMOLLM3_3B, WEIGHTS, EngineConfig(**settings), given)

    assert planned(2 * OWN_BYTES) == planned(OWN_BYTES) != planned(0), "arrays of a program are not part of the plan"
    assert planned(OWN_BYTES, beside_bytes=0) == planned(0, beside_bytes=0), "nor are engines loaded earlier"


def test_default_context_shrinks_in_steps_to_fit_memory() -> None:
    made = plan(2.35)
    step = 1024 * (kv_bytes_per_token(SMOLLM3_3B, "k8v8") + 4 * 128)

    assert made.reduced and made.kv_format == "k8v8"
    assert CONTEXT_FLOOR_TOKENS <= made.context_tokens < 8192 and made.context_tokens % 1024 == 0
    assert made.needed_bytes <= made.limit.available_bytes < made.needed_bytes + step


def test_plan_below_minimum_context_is_rejected_with_sizes() -> None:
    said = r"2,048 tokens in k4v3 needs [\d,]+ MiB, but the system leaves 2,048 MiB; the weights alone are [\d,]+ MiB"
    with pytest.raises(OutOfMemoryError, match=said) as caught:
        plan(2.0)

    assert caught.value.available_bytes == limit(2.0).available_bytes < caught.value.needed_bytes


def test_small_model_context_may_be_below_the_minimum() -> None:
    small = dataclasses.replace(SMOLLM3_3B, max_position_embeddings=512)
    made = plan_engine(small, WEIGHTS, EngineConfig(), limit(8))

    assert (made.context_tokens, made.reduced) == (512, False)


@pytest.mark.parametrize("kv", KV_CHOICES)
def test_out_of_memory_error_suggests_contexts_that_fit(kv: KVChoice) -> None:
    with pytest.raises(OutOfMemoryError) as caught:
        plan(3.5, context_tokens=131_072, kv=kv)

    offers = re.findall(r"([\d,]+)(?: tokens would fit)? in (\w+)(?=,|$)", str(caught.value).partition("; ")[2])
    assert offers
    for tokens, kv_format in offers:
        context = int(tokens.replace(",", ""))
        assert plan(3.5, context_tokens=context, kv=kv_format).kv_format == kv_format
        with pytest.raises(OutOfMemoryError):
            plan(3.5, context_tokens=context + 1024, kv=kv_format)


def test_out_of_memory_error_suggests_a_smaller_kv_format() -> None:
    with pytest.raises(OutOfMemoryError, match=r"tokens would fit in f16, [\d,]+ in k4v3"):
        plan(4, context_tokens=65_536, kv="f16")


def test_requested_context_is_not_changed() -> None:
    made = plan(8, context_tokens=5_000)

    assert (made.context_tokens, made.reduced, made.limit) == (5_000, False, limit(8))


def test_requested_context_is_clamped_to_longest_context() -> None:
    assert plan(64, context_tokens=131_073) == plan(64, context_tokens=131_072)
    assert plan(64, context_tokens=10**9).context_tokens == 131_072


@pytest.mark.parametrize(
    ("choices", "param", "said"),
    [
        ({"context_tokens": 0}, "context_tokens", "a positive whole number"),
        ({"kv": "q8_0"}, "kv", "auto, f16, k8v8, k8v4, k4v4, k4v3"),
        ({"max_num_seqs": 0}, "max_num_seqs", "from 1 to 64"),
        ({"max_num_seqs": 65}, "max_num_seqs", "from 1 to 64"),
    ],
)
def test_out_of_range_plan_option_is_rejected_by_name(choices: dict[str, object], param: str, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said) as caught:
        plan(64, **choices)

    assert caught.value.param == param


def test_sequences_share_kv_blocks_if_memory_is_ample() -> None:
    assert plan(64).kv_blocks * BLOCK_TOKENS == SHARED_TOKENS
    assert plan(64, max_num_seqs=2).kv_blocks * BLOCK_TOKENS == 2 * 8192
    assert plan(64, context_tokens=50_000).kv_blocks == 391  # one context, rounded up


def test_shared_kv_blocks_use_at_most_half_of_remaining_memory() -> None:
    made = plan(3.0)
    alone = plan(3.0, max_num_seqs=1)
    left = made.limit.available_bytes - alone.needed_bytes

    assert alone.kv_blocks < made.kv_blocks < SHARED_TOKENS // BLOCK_TOKENS
    assert 0.45 * left < made.needed_bytes - alone.needed_bytes <= 0.5 * left


@pytest.mark.parametrize("gib", [2.35, 2.8, 3.2, 4.0, 5.0, 6.0, 64.0])
def test_document_context_does_not_change_other_plan_fields(gib: float) -> None:
    alone, made = plan(gib), plan(gib, document_tokens=100_000)
    left = alone.limit.available_bytes - plan(gib, max_num_seqs=alone.max_num_seqs).needed_bytes

    for name in ("context_tokens", "kv_format", "max_num_seqs", "scratch_bytes", "reduced"):
        assert getattr(made, name) == getattr(alone, name)
    assert made.context_tokens <= made.document_tokens <= 65_536 and made.kv_blocks >= alone.kv_blocks
    assert made.document_tokens <= made.kv_blocks * BLOCK_TOKENS and made.needed_bytes <= made.limit.available_bytes
    assert made == alone or made.document_tokens % 1024 == 0
    assert (made.document_tokens == 65_536) == (gib > 6) or gib == 6.0
    assert left >= 0 and alone.document_tokens == alone.context_tokens


def test_requested_context_also_applies_to_documents() -> None:
    assert plan(64, context_tokens=16_384, document_tokens=65_536) == plan(64, context_tokens=16_384)


def test_each_sequence_of_a_tiny_context_gets_one_block() -> None:
    assert plan(64, context_tokens=16).kv_blocks == 16


def test_formats_below_8_bits_reserve_k8v8_window_blocks() -> None:
    roomy, tight = plan(64, context_tokens=65_536), plan(4.0, context_tokens=65_536, kv="k8v4")

    assert roomy.window_blocks == 16 * WINDOW_BLOCKS + STEP_WINDOW_BLOCKS and 1 <= tight.max_num_seqs < 16
    assert tight.window_blocks == tight.max_num_seqs * WINDOW_BLOCKS + STEP_WINDOW_BLOCKS
    beside = roomy.kv_bytes - 65_536 * kv_bytes_per_token(SMOLLM3_3B, "k8v4")
    assert beside == roomy.window_blocks * BLOCK_TOKENS * kv_bytes_per_token(SMOLLM3_3B, "k8v8")
    assert plan(64, kv="f16").window_blocks == plan(64).window_blocks == 0


@given(
    gib=st.floats(1.5, 40),
    context=st.none() | st.integers(1, 131_072),
    kv=st.sampled_from(KV_CHOICES),
    sequences=st.none() | st.integers(1, 64),
)
def test_random_plans_fit_memory_and_keep_requested_options(
    gib: float, context: int | None, kv: KVChoice, sequences: int | None
) -> None:
    try:
        made = plan(gib, context_tokens=context, kv=kv, max_num_seqs=sequences)
    except OutOfMemoryError as error:
        assert error.needed_bytes > error.available_bytes == limit(gib).available_bytes
        return
    assert made.needed_bytes <= made.limit.available_bytes
    assert made.needed_bytes == WEIGHTS + made.kv_bytes + scratch_bytes(SMOLLM3_3B, made.context_tokens) + PROCESS_BYTES
    assert made.context_tokens <= made.kv_blocks * BLOCK_TOKENS
    with_documents = plan(gib, context_tokens=context, document_tokens=65_536, kv=kv, max_num_seqs=sequences)
    assert with_documents.needed_bytes <= made.limit.available_bytes
    assert with_documents.document_tokens <= with_documents.kv_blocks * BLOCK_TOKENS
    assert context in (None, made.context_tokens) and sequences in (None, made.max_num_seqs)
    assert kv in ("auto", made.kv_format)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("gib", [2.5, 4, 6])
def test_largest_context_fits_and_one_step_more_does_not(kv_format: KVFormat, gib: float) -> None:
    tokens = largest_context(SMOLLM3_3B, WEIGHTS, kv_format, limit(gib))

    assert 0 < tokens <= SMOLLM3_3B.max_context_tokens
    assert plan(gib, context_tokens=tokens, kv=kv_format, max_num_seqs=1).context_tokens == tokens
    if tokens < SMOLLM3_3B.max_context_tokens:
        with pytest.raises(OutOfMemoryError):
            plan(gib, context_tokens=tokens + 1024, kv=kv_format, max_num_seqs=1)


def test_largest_context_is_zero_without_enough_memory() -> None:
    assert largest_context(SMOLLM3_3B, WEIGHTS, "k4v3", MemoryLimit("the system", MIB)) == 0


# ---------------------------------------------------------------- files of floats and of eight bits


@pytest.mark.parametrize(
    ("context", "kv_format"), [(None, "f16"), (32_768, "f16"), (32_769, "k8v8"), (131_072, "k8v8")]
)
def test_fine_weights_select_a_finer_kv_format(context: int | None, kv_format: KVFormat) -> None:
    """An 8-bit cache loses more accuracy than these weights' format."""
    assert plan(64, context_tokens=context, fine_weights=True).kv_format == kv_format
    if context is None:
        little = plan(2.5, fine_weights=True)
        assert little.kv_format == "f16" and little.reduced
    else:
        with pytest.raises(OutOfMemoryError, match=rf"tokens in {kv_format} needs .* tokens would fit in"):
            plan(2.5, context_tokens=context, fine_weights=True)


def test_remembered_kv_format_overrides_the_default() -> None:
    assert plan(64, fine_weights=True, stored="k8v8").kv_format == "k8v8"
    assert plan(64, stored="k8v4").kv_format == "k8v4"
    assert plan(64, stored="k8v4", kv="f16").kv_format == "f16"
    assert plan(4.3, context_tokens=131_072, stored="k8v8").kv_format == "k4v3", "other files depend on memory"


FORMATS_OF_FILES = {
    "F32": "f16", "F16": "f16", "BF16": "f16", "Q8_0": "f16", "Q6_K": "k8v8", "Q4_K_M": "k8v8", "Q4_0": "k8v8",
}  # fmt: skip


@pytest.mark.parametrize(
    "mix",
    [
        mix if mix in ("Q4_K_M", "F16") else pytest.param(mix, marks=pytest.mark.long("engine"))
        for mix in FORMATS_OF_FILES
    ],
)
def test_kv_format_depends_on_weights_and_is_remembered(tmp_path: Path, mix: str) -> None:
    model, cache = tmp_path / "model.gguf", tmp_path / "kv"
    convert(write_folder(SMALL, tmp_path / "folder"), model, mix)

    def loaded(**settings: Any) -> str:
        with Engine.load(model, threads=1, **settings) as engine:
            return engine.info.kv_format

    expected = FORMATS_OF_FILES[mix]
    assert loaded(context_tokens=256) == expected
    assert loaded(context_tokens=256, cache_dir=cache) == expected
    kept = json.loads((cache / "formats.json").read_text())
    assert list(kept.values()) == [expected]
    (cache / "formats.json").write_text(json.dumps(dict.fromkeys(kept, "k8v4")))  # chosen by another version
    assert loaded(context_tokens=256, cache_dir=cache) == "k8v4"
    assert loaded(context_tokens=128, cache_dir=cache) == expected, "the choice depends on the context"
    assert loaded(context_tokens=256, cache_dir=cache, kv="k4v4") == "k4v4"
    assert sorted(json.loads((cache / "formats.json").read_text()).values()) == sorted(["k8v4", expected])
    (cache / "formats.json").write_text("[" * 100_000)
    assert loaded(context_tokens=256, cache_dir=cache) == expected
