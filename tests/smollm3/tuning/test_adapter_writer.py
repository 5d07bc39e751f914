"""PEFT folders converted to GGUF adapters and merged files give the same results in the engine."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
from golden.adapters import golden_pairs, write_peft
from golden.random_models import RANDOM

from notso.smollm3 import Engine
from notso.smollm3.conversion.quantizer import quantize
from notso.smollm3.model.weights import MATRICES
from notso.smollm3.tuning.adapter_writer import write_adapter, write_merged

MERGED_ERROR = 2e-4
"""Relative to the logit range, because sums have another order, and keys and values may be rounded to other
half-precision values."""


def test_written_adapter_and_merged_model_match_the_peft_folder(tmp_path: Path) -> None:
    base = RANDOM.write(tmp_path / "base.gguf")
    folder = write_peft(tmp_path / "peft", golden_pairs(base), RANDOM.head_dim, target_modules=list(MATRICES))
    out = tmp_path / "made.gguf"
    size = write_adapter(folder, base, out, "made")
    reader = gguf.GGUFReader(out)
    said = {key: reader.fields[key].contents() for key in ("general.type", "adapter.type", "general.architecture")}
    assert said == {"general.type": "adapter", "adapter.type": "lora", "general.architecture": "smollm3"}
    assert size == sum(tensor.n_bytes for tensor in reader.tensors)
    assert {tensor.tensor_type.name for tensor in reader.tensors} == {"F16"}
    write_merged(folder, base, tmp_path / "merged.gguf", "F32")
    ids = RANDOM.prompts(1, 30)[-1]
    with Engine.load(base, kv="f16", adapters=[f"folder={folder}", f"file={out}"]) as engine:
        plain, ours, theirs = (engine.logits(ids, adapter=name) for name in (None, "file", "folder"))
    np.testing.assert_array_equal(ours, theirs)
    with Engine.load(tmp_path / "merged.gguf", kv="f16") as engine:
        merged = engine.logits(ids)
    reach = float(np.ptp(theirs))
    assert np.abs(merged - theirs).max() < MERGED_ERROR * reach < 0.01 * np.abs(plain - theirs).max()


def test_values_beyond_half_precision_are_written_as_f32(tmp_path: Path) -> None:
    base = RANDOM.write(tmp_path / "base.gguf")
    folder = write_peft(tmp_path / "peft", golden_pairs(base), RANDOM.head_dim, target_modules=list(MATRICES))
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(settings | {"lora_alpha": 1e8}))
    write_adapter(folder, base, tmp_path / "made.gguf", "made")
    kinds = {tensor.name[-1]: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "made.gguf").tensors}
    assert kinds == {"a": "F32", "b": "F16"}


def test_merged_file_records_its_quantization_type(tmp_path: Path) -> None:
    from golden.random_models import RandomModel

    model = RandomModel(layers=2, hidden=256, ffn=256, heads=2, kv_heads=1, head_dim=128, vocab=400)
    base = model.write(tmp_path / "base.gguf")
    folder = write_peft(tmp_path / "peft", golden_pairs(base), model.head_dim, target_modules=list(MATRICES))
    quantize(base, tmp_path / "calibrated.gguf", "Q8_0", ("words", "one two three " * 400), threads=1)
    write_merged(folder, tmp_path / "calibrated.gguf", tmp_path / "merged.gguf", "Q4_K_M")
    reader = gguf.GGUFReader(tmp_path / "merged.gguf")
    assert reader.fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q4_K_M
    assert {tensor.tensor_type.name for tensor in reader.tensors} == {"F32", "Q4_K", "Q6_K"}
    assert not any("imatrix" in key for key in reader.fields)  # no importance matrix was used
