"""Adapter folders and the installed PEFT: every field is classified, and accepted adapters give PEFT's results."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden.compare import FLOAT_TOLERANCE
from golden.peft_cases import BASE, COMPUTED, Case
from smollm3.conversion.hf_folder_of import write_folder

from notso.smollm3 import Engine
from notso.smollm3.model import lora
from notso.smollm3.values.engine_config import AdapterSource

peft = pytest.importorskip("peft", reason="make test-tune has it")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

IDS = BASE.prompts(1, 60)[-1]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = BASE.write(tmp_path_factory.mktemp("base") / "base.gguf")
    with Engine.load(path, context_tokens=128, threads=1, kv="f16") as engine:
        yield engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(BASE, tmp_path_factory.mktemp("hf") / "base")


def base_model(folder: Path) -> Any:
    import torch
    from transformers import SmolLM3ForCausalLM

    torch.set_num_threads(1)
    return SmolLM3ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def logits(model: Any) -> np.ndarray:
    import torch

    with torch.no_grad():
        return np.asarray(model(torch.tensor([IDS])).logits[0].float())


def test_every_installed_lora_field_is_classified() -> None:
    fields = {field.name for field in dataclasses.fields(peft.LoraConfig) if not field.name.startswith("_")}
    known = lora.COMPUTED | lora.HARMLESS | set(lora.REFUSED) | set(lora.CHOICES)
    assert fields == known


@pytest.mark.parametrize(
    "settings", [{}, {"velora_config": {"num_groups": 8}}, {"monteclora_config": {"num_samples": 2}}], ids=str
)
def test_adapter_saved_by_peft_gives_the_logits_of_peft(
    engine: Engine, folder: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Each field has its default, as written by `save_pretrained`; tensors that only training uses are ignored."""
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj", "up_proj"], init_lora_weights=False, **settings
    )
    model = peft.get_peft_model(base_model(folder), config).eval()
    model.save_pretrained(tmp_path / "saved")
    assert len(json.loads((tmp_path / "saved" / "adapter_config.json").read_text())) > 30
    engine.adapters.add(AdapterSource("saved", str(tmp_path / "saved")))
    try:
        check(engine.logits(IDS, adapter="saved"), logits(model), logits(base_model(folder)))
    finally:
        engine.adapters.remove("saved")


@pytest.mark.parametrize("case", COMPUTED, ids=lambda case: case.name)
def test_supported_adapter_settings_give_the_logits_of_peft(
    engine: Engine, folder: Path, tmp_path: Path, case: Case
) -> None:
    adapter = case.write(tmp_path / "adapter", engine.config)
    base = base_model(folder)
    plain = logits(base)
    wanted = logits(peft.PeftModel.from_pretrained(base, adapter).eval())
    engine.adapters.add(AdapterSource("case", str(adapter)))
    try:
        check(engine.logits(IDS, adapter="case"), wanted, plain)
    finally:
        engine.adapters.remove("case")


def check(ours: np.ndarray, wanted: np.ndarray, plain: np.ndarray) -> None:
    """Assert that the error is within the base model's tolerance, and that the adapter has an effect."""
    extent = wanted.max() - wanted.min()
    assert np.abs(ours - wanted).max() < FLOAT_TOLERANCE * extent
    assert np.abs(wanted - plain).max() > 10 * FLOAT_TOLERANCE * extent
