"""`inspect_file` on a small known file, on a file of full size (by arithmetic), and on files that are not SmolLM3."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from notso.qtensor.errors import GGUFError
from notso.qtensor.formats import F32
from notso.qtensor.gguf import GGUFFile
from notso.qtensor.gguf_writer import GGUFWriter
from notso.smollm3.config import SmolLM3Config
from notso.smollm3.diagnostics import inspection
from notso.smollm3.diagnostics.inspection import Inspection, inspect_file
from notso.smollm3.diagnostics.synth import write_synthetic
from notso.smollm3.kv.kv_cache import KV_FORMATS
from notso.system.memory import MemoryLimit

SIZES = {"layers": 9, "hidden": 256, "ffn": 512, "heads": 4, "kv_heads": 1, "vocab": 1300}
TEMPLATE = "{{ messages }}" * 30


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, small_metadata: dict[str, Any]) -> Path:
    path = tmp_path_factory.mktemp("inspection") / "small.gguf"
    write_synthetic(path, **SIZES, tokenizer=small_metadata, template=TEMPLATE)
    return path


@pytest.fixture(scope="module")
def found(path: Path) -> Inspection:
    return inspect_file(path)


def test_totals_match_the_file(path: Path, found: Inspection) -> None:
    matrices = 1300 * 256 + 9 * (2 * 256 * 256 + 2 * 64 * 256 + 3 * 512 * 256)
    assert found.parameters == matrices + (2 * 9 + 1) * 256
    assert found.size_bytes == path.stat().st_size
    assert found.tensor_bytes == sum(t.size_bytes for t in found.tensors) == sum(f.size_bytes for f in found.formats)
    assert (found.gguf_version, found.alignment, len(found.tensors), found.problem) == (3, 32, 2 + 9 * 9, None)
    assert found.bits_per_parameter == pytest.approx(8 * found.tensor_bytes / found.parameters)
    counts = {total.format: total.tensors for total in found.formats}
    assert counts == {"Q4_K": 5 * 9 + 2 * 4, "Q6_K": 1 + 2 * 5, "F32": 19}
    assert [f.size_bytes for f in found.formats] == sorted((f.size_bytes for f in found.formats), reverse=True)
    assert found.tensors[0].name == "token_embd.weight" and found.tensors[0].shape == (1300, 256)


def test_inspection_reports_layers_and_bytes_per_token(found: Inspection) -> None:
    assert found.run is not None
    assert found.run.nope_layers == (3, 7)
    assert found.run.q6_k_layers == (0, 3, 6, 7, 8)
    assert found.run.tied_embeddings
    assert found.run.weight_bytes_per_token == found.tensor_bytes + 210  # plus one row of the embedding
    assert found.run.kv_values_per_token == 2 * 9 * 1 * 64
    assert {plan.format: plan.bytes_per_token for plan in found.run.cache} == {
        "f16": 2304,
        "k8v8": 1188,
        "k8v4": 900,
        "k4v4": 612,
        "k4v3": 540,
    }


def test_cache_plan_of_the_3b_model_matches_documented_figures() -> None:
    config = SmolLM3Config(2048, 11008, 36, 16, 4, 128, 128256, 65536, 1e-6, 5e6, (1, 1, 1, 0) * 9)
    weights = 1_907_462_144
    memory = MemoryLimit("the system", 4_000_000_000)
    plans = [inspection._cache_plan(kv_format, config, weights, memory) for kv_format in KV_FORMATS]
    assert [plan.bytes_per_token for plan in plans] == [73_728, 37_440, 28_224, 19_008, 16_704]
    assert [plan.bits_per_value for plan in plans] == [16, 8.125, 6.125, 4.125, 3.625]
    assert plans[0].bytes_at[65_536] == int(4.5 * 2**30)
    fits = [plan.fits_tokens for plan in plans]
    assert fits == sorted(fits) and 20_000 < fits[0] < 28_000 and all(n % 1024 == 0 for n in fits)
    plenty, nothing = MemoryLimit("the system", 1 << 40), MemoryLimit("the system", weights)
    assert inspection._cache_plan("f16", config, weights, plenty).fits_tokens == 131_072
    assert inspection._cache_plan("f16", config, weights, nothing).fits_tokens == 0


def test_cache_plan_respects_available_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "available_memory", lambda: MemoryLimit("the control group", 300 << 20))
    run = inspect_file(path).run
    assert run is not None
    assert (run.available_bytes, run.available_source) == (300 << 20, "the control group")
    f16 = run.cache[0]
    assert 0 < f16.fits_tokens * f16.bytes_per_token < 300 << 20


def test_inspection_reports_tokenizer_and_metadata(found: Inspection, small_metadata: dict[str, Any]) -> None:
    assert found.tokenizer is not None
    assert (found.tokenizer.kind, found.tokenizer.pre, found.tokenizer.tokens) == ("gpt2", "smaug-bpe", 1300)
    assert found.tokenizer.merges == len(small_metadata["tokenizer.ggml.merges"])
    assert found.tokenizer.control_tokens == 6 + 100 and found.tokenizer.user_defined_tokens == 6
    assert found.tokenizer.template_bytes == len(TEMPLATE) and found.tokenizer.template_known is None
    entries = {entry.key: entry for entry in found.metadata}
    assert entries["smollm3.block_count"].value == 9 and entries["smollm3.block_count"].type == "uint32"
    assert (entries["tokenizer.ggml.tokens"].value, entries["tokenizer.ggml.tokens"].length) == (None, 1300)
    assert (entries["tokenizer.chat_template"].value, entries["tokenizer.chat_template"].length) == (
        None,
        len(TEMPLATE),
    )


def test_inspection_serializes_to_json(found: Inspection) -> None:
    plain = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert plain["run"]["nope_layers"] == [3, 7]
    assert plain["run"]["cache"][0]["bytes_at"]["8192"] == 2304 * 8192
    assert len(plain["tensors"]) == 83
    assert "tensors" not in found.as_dict(tensors=False)


def test_an_untied_head_is_counted_instead_of_the_embedding(tmp_path: Path, path: Path) -> None:
    with GGUFFile.open(path) as file, GGUFWriter(tmp_path / "x.gguf") as writer:
        for key, value in file.metadata.items():
            writer.add(key, value, file.metadata_types[key])
        for tensor in file.tensors.values():
            writer.add_tensor(tensor.name, tensor.shape, tensor.format, tensor.data)
        writer.add_tensor("output.weight", (1300, 256), F32, bytes(1300 * 1024))
    found = inspect_file(tmp_path / "x.gguf")
    assert found.run is not None and not found.run.tied_embeddings
    assert found.run.weight_bytes_per_token == found.tensor_bytes - 1300 * 210 + 210


def test_unsupported_file_is_inspected_and_reports_a_problem(tmp_path: Path) -> None:
    with GGUFWriter(tmp_path / "x.gguf") as writer:
        writer.add("general.architecture", "other", "string")
        writer.add("short", [1, 2], "array of int32")
        writer.add("words", ["w" * 300, "b"], "array of string")
        writer.add("nan", float("nan"), "float32")
        writer.add_tensor("w", (2, 3), F32, bytes(24))
    found = inspect_file(tmp_path / "x.gguf")
    assert found.run is None and found.tokenizer is None and "other" in (found.problem or "")
    entries = {entry.key: entry.value for entry in found.metadata}
    assert entries["short"] == (1, 2) and entries["words"] == ("w" * 199 + "…", "b")
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False))["metadata"][3]["value"] == "nan"


def test_empty_gguf_file_is_inspected(tmp_path: Path) -> None:
    with GGUFWriter(tmp_path / "x.gguf"):
        pass
    found = inspect_file(tmp_path / "x.gguf")
    assert (found.parameters, found.bits_per_parameter, found.tensors) == (0, 0.0, ())
    assert found.problem


def test_text_file_raises_gguf_error(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_text("hello")
    with pytest.raises(GGUFError):
        inspect_file(tmp_path / "x.gguf")
