"""Every tensor of a file has exactly one role; otherwise, the file is rejected with the tensor's name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from golden.random_models import RANDOM, RandomModel

from notso.qtensor.formats import F16, F32, Q8_0
from notso.qtensor.gguf import GGUFFile
from notso.qtensor.tensor import QTensor
from notso.smollm3 import Engine
from notso.smollm3.config import SmolLM3Config
from notso.smollm3.errors import ModelFileError
from notso.smollm3.model.weights import FILE_TYPES, SmolLM3Weights

SMALL = replace(RANDOM, layers=2, hidden=64, ffn=96, heads=4, kv_heads=2, head_dim=16, vocab=300)
NAMES = tuple(SMALL.tensors())
LAYER = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GGUFFile]:
    with GGUFFile.open(SMALL.write(tmp_path_factory.mktemp("small") / "small.gguf")) as opened:
        yield opened


@pytest.fixture
def tensors(file: GGUFFile) -> dict[str, QTensor]:
    """Return a copy of the file's tensors, for a test to change."""
    return dict(file.tensors)


@pytest.fixture(scope="module")
def config(file: GGUFFile) -> SmolLM3Config:
    return SmolLM3Config.from_metadata(file.metadata)


def zeros(name: str, *shape: int) -> QTensor:
    return QTensor.quantize(np.zeros(shape, np.float32), F32, name)


def test_tensors_are_assigned_to_their_roles(tensors: dict[str, QTensor], config: SmolLM3Config) -> None:
    weights = SmolLM3Weights.from_tensors(tensors, config)
    assert weights.embed_tokens.name == "token_embd.weight"
    assert weights.lm_head is weights.embed_tokens
    assert [layer.q_proj.name for layer in weights.layers] == ["blk.0.attn_q.weight", "blk.1.attn_q.weight"]
    second = weights.layers[1]
    roles = (second.k_proj, second.v_proj, second.o_proj, second.gate_proj, second.up_proj, second.down_proj)
    expected = ("attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    assert [role.name for role in roles] == [f"blk.1.{name}.weight" for name in expected]
    for ours, name in (
        (second.input_layernorm, "blk.1.attn_norm.weight"),
        (second.post_attention_layernorm, "blk.1.ffn_norm.weight"),
        (weights.norm, "output_norm.weight"),
    ):
        np.testing.assert_array_equal(ours, tensors[name].as_float32())


def test_random_model_has_eleven_kinds_of_tensors() -> None:
    assert set(NAMES) == {"token_embd.weight", "output_norm.weight"} | {
        f"blk.{layer}.{name}.weight" for layer in range(2) for name in LAYER
    }


@pytest.mark.parametrize("name", NAMES)
def test_missing_tensor_is_rejected_by_name(tensors: dict[str, QTensor], config: SmolLM3Config, name: str) -> None:
    del tensors[name]
    with pytest.raises(ModelFileError, match=rf"has no tensor '{name}'"):
        SmolLM3Weights.from_tensors(tensors, config)


@pytest.mark.parametrize("name", NAMES)
def test_wrong_tensor_shape_is_rejected_by_name(tensors: dict[str, QTensor], config: SmolLM3Config, name: str) -> None:
    shape = tensors[name].shape
    turned = (shape[0] + 1,) if len(shape) == 1 else (shape[0] + 1, shape[1])
    for wrong in (turned, (*shape, 1), (1, *shape)):
        tensors[name] = zeros(name, *wrong)
        with pytest.raises(ModelFileError, match=f"'{name}'"):
            SmolLM3Weights.from_tensors(tensors, config)


@pytest.mark.parametrize("name", [name for name in NAMES if "norm" in name])
def test_norm_that_is_not_f32_is_rejected_by_name(
    tensors: dict[str, QTensor], config: SmolLM3Config, name: str
) -> None:
    tensors[name] = QTensor.quantize(np.ones(SMALL.hidden, np.float32), F16, name)
    with pytest.raises(ModelFileError, match=f"'{name}' must be F32"):
        SmolLM3Weights.from_tensors(tensors, config)


@pytest.mark.parametrize(
    "name",
    ["rope_freqs.weight", "blk.2.attn_q.weight", "blk.0.attn_q.bias", "blk.0.attn_q_norm.weight", "output_norm.bias"],
)
def test_unused_tensor_is_rejected_by_name(tensors: dict[str, QTensor], config: SmolLM3Config, name: str) -> None:
    tensors[name] = zeros(name, SMALL.hidden)
    with pytest.raises(ModelFileError, match=f"does not use: '{name}'"):
        SmolLM3Weights.from_tensors(tensors, config)


def test_separate_output_matrix_is_used_and_checked(tensors: dict[str, QTensor], config: SmolLM3Config) -> None:
    tensors["output.weight"] = zeros("output.weight", SMALL.vocab, SMALL.hidden)
    weights = SmolLM3Weights.from_tensors(tensors, config)
    assert weights.lm_head is tensors["output.weight"]
    assert weights.embed_tokens is tensors["token_embd.weight"]
    tensors["output.weight"] = zeros("output.weight", SMALL.hidden, SMALL.vocab)
    with pytest.raises(ModelFileError, match=r"'output\.weight' has shape"):
        SmolLM3Weights.from_tensors(tensors, config)


def test_any_supported_format_may_hold_a_matrix(tensors: dict[str, QTensor], config: SmolLM3Config) -> None:
    name = "blk.0.ffn_up.weight"
    tensors[name] = QTensor.quantize(tensors[name].as_float32(), Q8_0, name)
    assert SmolLM3Weights.from_tensors(tensors, config).layers[0].up_proj.format == Q8_0


def test_engine_load_error_names_the_unexpected_tensor(tmp_path: Path) -> None:
    """Configuration and tensors disagree: the error is one line, and nothing is computed."""

    class OneMore(RandomModel):
        def tensors(self) -> dict[str, tuple[tuple[int, ...], float]]:
            return {**SMALL.tensors(), "blk.2.ffn_up.weight": ((96, 64), 1.0)}

    path = replace(SMALL, layers=2).write(tmp_path / "right.gguf")
    Engine.load(path, context_tokens=16).close()
    wrong = OneMore(**{name: getattr(SMALL, name) for name in RandomModel.__slots__})
    with pytest.raises(ModelFileError, match=r"'blk\.2\.ffn_up\.weight'") as caught:
        Engine.load(wrong.write(tmp_path / "wrong.gguf"), context_tokens=16)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("mix", FILE_TYPES)
def test_file_type_numbers_match_ggml(mix: str) -> None:
    wholly = {"F32": "ALL_F32", "MXFP4": "MOSTLY_MXFP4_MOE"}
    small = f"MOSTLY_{mix}_S" if mix in ("Q3_K", "Q4_K", "Q5_K") else f"MOSTLY_{mix}"
    assert gguf.LlamaFileType(FILE_TYPES[mix]).name == wholly.get(mix, small)
