"""A converted Hugging Face folder equals the GGUF file with the same weights."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden.random_models import RANDOM, RandomModel
from smollm3.conversion.hf_folder_of import write_folder

from notso.qtensor import GGUFFile, QTensor, SafetensorsError
from notso.smollm3 import Engine, InvalidRequestError, ModelFileError
from notso.smollm3.conversion import converter, hf_config
from notso.smollm3.conversion.converter import MIXES, convert
from notso.smollm3.model.weights import SmolLM3Weights

MODELS = [
    RandomModel(layers=4),
    RandomModel(layers=5, hidden=256, ffn=512, heads=4, kv_heads=2, head_dim=64, vocab=700, tied=False),
    RandomModel(layers=2, hidden=256, ffn=256, heads=2, kv_heads=1, head_dim=128, vocab=400),
]
SMALL = MODELS[2]


def facts(path: Path) -> tuple[dict[str, Any], dict[str, QTensor]]:
    file = GGUFFile.open(path)
    return dict(file.metadata), dict(file.tensors)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("model", MODELS)
def test_converted_tensors_equal_those_of_the_gguf_file(tmp_path: Path, model: RandomModel, shards: int) -> None:
    expected, tensors = facts(model.write(tmp_path / "expected.gguf"))
    out = tmp_path / "made.gguf"
    convert(write_folder(model, tmp_path / "random weights", shards=shards), out, "F32")
    metadata, made = facts(out)
    assert list(made) == list(tensors)
    for name, tensor in made.items():
        assert tensor.shape == tensors[name].shape and tensor.format == tensors[name].format
        assert tensor.data.tobytes() == tensors[name].data.tobytes(), name
    for key, value in expected.items():
        if model.head_dim * model.heads != model.hidden or not key.endswith(("key_length", "value_length")):
            assert metadata[key] == value, key


def test_two_threads_convert_a_folder_to_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, out = write_folder(SMALL, tmp_path / "folder"), tmp_path / "made.gguf"
    both_have_written, validate = threading.Barrier(2, timeout=60), converter.SmolLM3Weights.from_tensors

    def wait_and_validate(*arguments: Any) -> SmolLM3Weights:
        both_have_written.wait()
        return validate(*arguments)

    monkeypatch.setattr(converter.SmolLM3Weights, "from_tensors", wait_and_validate)
    with ThreadPoolExecutor(2) as pool:
        sizes = [each.result() for each in [pool.submit(convert, folder, out, "F16") for _ in range(2)]]
    assert sizes[0] == sizes[1]
    assert list(out.parent.glob("*.gguf")) == [out] and not list(out.parent.glob(".*"))


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_f32_f16_and_bf16_weights_are_converted(tmp_path: Path, dtype: str) -> None:
    """Values have eight significant bits, which every type represents exactly."""

    class Coarse(RandomModel):
        def weights(self) -> Any:
            for name, values in super().weights():
                yield name, (values.view(np.uint32) & 0xFFFF0000).view(np.float32).copy()

    model = Coarse(**{name: getattr(SMALL, name) for name in SMALL.__dataclass_fields__})
    convert(write_folder(model, tmp_path / "folder", dtype), tmp_path / "made.gguf", "F32")
    for name, values in model.weights():
        made = facts(tmp_path / "made.gguf")[1][name]
        close = np.float32(2**-24) if dtype == "F16" else 0
        np.testing.assert_allclose(made.as_float32(), values, rtol=0, atol=close)


def test_logits_of_converted_model_equal_those_of_the_gguf_file(tmp_path: Path) -> None:
    convert(write_folder(RANDOM, tmp_path / "folder"), tmp_path / "made.gguf", "F32")
    RANDOM.write(tmp_path / "expected.gguf")
    ids = RANDOM.prompts(1, 40)[-1]
    with Engine.load(tmp_path / "made.gguf") as made, Engine.load(tmp_path / "expected.gguf") as expected:
        assert made.logits(ids).tobytes() == expected.logits(ids).tobytes(), "tests compare that file with transformers"


@pytest.mark.parametrize("mix", MIXES)
def test_conversion_to_every_mix_is_reproducible_and_runs(tmp_path: Path, mix: str) -> None:
    folder, out = write_folder(SMALL, tmp_path / "folder"), tmp_path / "made.gguf"
    seen: list[tuple[int, int]] = []
    size = convert(folder, out, mix, lambda done, all_of_it: seen.append((done, all_of_it)))
    assert seen[-1] == (size, size)
    convert(folder, tmp_path / "again.gguf", mix)
    assert out.read_bytes() == (tmp_path / "again.gguf").read_bytes()
    formats = {tensor.format.name for tensor in facts(out)[1].values()}
    assert formats == {"Q4_K_M": {"F32", "Q4_K", "Q6_K"}, "Q5_K_M": {"F32", "Q5_K", "Q6_K"}}.get(mix, {"F32", mix})
    with Engine.load(out, context_tokens=64) as engine:
        assert np.isfinite(engine.logits([1, 2, 3])).all()


def test_embedding_rows_without_token_become_padding_tokens(tmp_path: Path) -> None:
    folder = write_folder(SMALL, tmp_path / "folder")
    content = json.loads((folder / "tokenizer.json").read_text())
    last = max(content["model"]["vocab"], key=content["model"]["vocab"].get)
    del content["model"]["vocab"][last]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    convert(folder, tmp_path / "made.gguf", "F16")
    metadata, _ = facts(tmp_path / "made.gguf")
    assert list(metadata["tokenizer.ggml.tokens"])[-1] == "[PAD399]"
    assert list(metadata["tokenizer.ggml.token_type"])[-1] == 5


def test_yarn_settings_are_converted_from_both_config_forms(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512, "rope_theta": 5e6}
    for number, config in enumerate(({"rope_scaling": rope}, {"rope_parameters": rope, "rope_theta": None})):
        folder = write_folder(SMALL, tmp_path / f"folder-{number}", **config)
        convert(folder, tmp_path / "made.gguf", "F16")
        metadata, _ = facts(tmp_path / "made.gguf")
        assert metadata["smollm3.rope.scaling.type"] == "yarn" and metadata["smollm3.rope.scaling.factor"] == 2.0
        assert metadata["smollm3.rope.scaling.original_context_length"] == 512
        assert metadata["smollm3.rope.freq_base"] == 5e6


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"no_rope_layers": [1, 1]}, None),
        ({"no_rope_layers": [1, 0]}, r"must be 0 for layers 4, 8, 12, \.\.\. "),
        ({"no_rope_layer_interval": 3}, "no_rope_layer_interval must be 4"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "RoPE scaling of type 'llama3'"),
        ({"hidden_size": "256"}, "hidden_size must be a positive integer, not '256'"),
        ({"rms_norm_eps": None}, "rms_norm_eps must be a number, not None"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a number, not 10"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number, not nan"),
        ({"num_hidden_layers": 3, "no_rope_layers": None}, "has no tensor model.layers.2.input_layernorm.weight"),
        ({"num_hidden_layers": 1, "no_rope_layers": None}, "does not use: 'model.layers.1"),
        ({"tie_word_embeddings": False}, "has no tensor lm_head.weight"),
        ({"vocab_size": 2_000_000_000}, "vocab_size exceeds the maximum of 1,000,000"),
        ({"vocab_size": 300}, "400 tokens, but the embedding has 300 rows"),
        ({"num_attention_heads": 3}, "the configuration implies"),
    ],
)
def test_unsupported_configuration_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], words: str | None
) -> None:
    folder = write_folder(SMALL, tmp_path / "folder", **config)
    if words is None:
        convert(folder, tmp_path / "made.gguf", "F16")
        return
    with pytest.raises(ModelFileError, match=words):
        convert(folder, tmp_path / "made.gguf", "F16")
    assert not list(tmp_path.glob("*.gguf*")) and not list(tmp_path.glob(".*"))


def test_no_rope_layers_error_follows_the_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_config, "NO_ROPE_LAYER_INTERVAL", 2)
    folder = write_folder(SMALL, tmp_path / "folder", no_rope_layers=[0, 1], no_rope_layer_interval=2)
    with pytest.raises(ModelFileError) as error:
        convert(folder, tmp_path / "made.gguf", "F16")
    assert str(error.value).endswith("must be 0 for layers 2, 4, 6, ... (counted from 1) and 1 for the others")


@pytest.mark.parametrize("gone", ["config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"])
def test_missing_file_of_a_folder_is_named(tmp_path: Path, gone: str) -> None:
    folder = write_folder(SMALL, tmp_path / "folder")
    (folder / gone).unlink()
    with pytest.raises((ModelFileError, OSError)) as error:
        convert(folder, tmp_path / "made.gguf", "F16")
    assert gone.partition(".")[0].replace("_", " ") in str(error.value).replace("_", " ")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", b"[" * 100_000, "not a byte-level BPE tokenizer.json"),
        ("tokenizer.json", b"version https://git-lfs.github.com/spec/v1\n", "tokenizer.json is a Git LFS pointer"),
        (
            "tokenizer.json",
            b'{"model": {"vocab": {"a": "x", "b": 1}, "merges": []}, "added_tokens": []}',
            "its model is None, not BPE",
        ),
        ("chat_template.jinja", b"\xff", "chat_template.jinja is not UTF-8 text"),
        ("chat_template.jinja", b"x" * (2 << 20), "chat_template.jinja: it is larger than 1 MiB"),
    ],
)
def test_invalid_tokenizer_or_template_is_refused(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    folder = write_folder(SMALL, tmp_path / "folder")
    (folder / name).write_bytes(content)
    with pytest.raises(ModelFileError, match=words):
        convert(folder, tmp_path / "made.gguf", "F16")


def test_invalid_weight_index_is_refused(tmp_path: Path) -> None:
    folder = write_folder(SMALL, tmp_path / "folder", shards=2)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "../elsewhere.safetensors"}}))
    with pytest.raises(ModelFileError, match="outside its folder"):
        convert(folder, tmp_path / "made.gguf", "F16")
    index.write_text("[]")
    with pytest.raises(ModelFileError, match="lists no files"):
        convert(folder, tmp_path / "made.gguf", "F16")


def test_invalid_type_row_size_or_weights_are_refused(tmp_path: Path) -> None:
    folder = write_folder(replace(SMALL), tmp_path / "folder")
    with pytest.raises(InvalidRequestError, match="type 'IQ4_XS' is not supported"):
        convert(folder, tmp_path / "made.gguf", "IQ4_XS")
    odd = write_folder(RandomModel(layers=1, hidden=96, ffn=64, heads=2, kv_heads=1, head_dim=48), tmp_path / "odd")
    with pytest.raises(InvalidRequestError, match="row length 96 is not a multiple of Q"):
        convert(odd, tmp_path / "made.gguf", "Q4_K_M")
    (folder / "model.safetensors").write_bytes(b"\x00" * 7)
    with pytest.raises(SafetensorsError, match=r"model.safetensors: the file is too short"):
        convert(folder, tmp_path / "made.gguf", "F16")
    assert not list(tmp_path.glob("*.gguf*"))
