"""Model folders beside the installed transformers: what is converted computes what it computes there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden.compare import FLOAT_TOLERANCE
from golden.folder_cases import BASE, COMPUTED, FolderCase

from notso.smollm3 import Engine
from notso.smollm3.conversion import hf_config
from notso.smollm3.conversion.converter import convert

transformers = pytest.importorskip("transformers", reason="make test-tune has it")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

IDS = BASE.prompts(1, 120)[-1]


def load(folder: Path) -> Any:
    import torch

    torch.set_num_threads(1)
    return transformers.SmolLM3ForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.mark.parametrize("case", COMPUTED, ids=lambda case: case.name)
def test_what_is_converted_computes_what_it_does_there(tmp_path: Path, case: FolderCase) -> None:
    import torch

    folder = case.write(tmp_path / "folder")
    model = load(folder)
    with torch.no_grad():
        wanted = np.asarray(model(torch.tensor([IDS])).logits[0])
    convert(folder, tmp_path / "made.gguf", "F32")
    with Engine.load(tmp_path / "made.gguf", context_tokens=128, threads=1, kv="f16") as engine:
        ours = engine.logits(IDS)
        rotary = model.model.rotary_emb
        frequencies, factor = engine.config.rope_frequencies(128)
    assert np.abs(ours - wanted).max() < FLOAT_TOLERANCE * (wanted.max() - wanted.min())
    np.testing.assert_allclose(frequencies, rotary.inv_freq.numpy(), rtol=1e-5)
    assert factor == pytest.approx(rotary.attention_scaling, rel=1e-6)


def test_every_field_of_the_installed_configurations_has_a_verdict() -> None:
    """Those of transformers' tomorrow are refused by name until somebody has looked at them."""
    saved = transformers.SmolLM3Config(head_dim=128).to_dict()
    saved |= transformers.AutoConfig.for_model("smollm3").to_diff_dict()
    known = hf_config.COMPUTED | hf_config.HARMLESS
    assert {name for name in saved if name not in known} == set()
    fields = vars(transformers.GenerationConfig())
    read = {"eos_token_id", *hf_config.GENERATION_HARMLESS, *hf_config.GENERATION_CHOSEN, *hf_config.GENERATION_NEUTRAL}
    refused = {
        *("stop_strings", "use_mtp", "bad_words_ids", "renormalize_logits", "forced_bos_token_id"),
        *("forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens"),
        *("begin_suppress_tokens", "sequence_bias", "token_healing", "watermarking_config", "dola_layers"),
        *("constraints", "force_words_ids"),
    }
    assert {name for name in fields if name not in read} == refused


def test_what_transformers_saves_is_converted(tmp_path: Path) -> None:
    folder = COMPUTED[0].write(tmp_path / "folder")
    model = load(folder)
    model.save_pretrained(tmp_path / "saved")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "chat_template.jinja").write_text((folder / "chat_template.jinja").read_text())
    convert(tmp_path / "saved", tmp_path / "made.gguf", "F32")
