"""Converted model folders give the results of the installed transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden.compare import FLOAT_TOLERANCE
from golden.folder_cases import BASE, COMPUTED, FolderCase
from smollm3.conversion.hf_folder_of import config_of
from smollm3.conversion.test_unusual_folders import TAKEN, write

from notso.smollm3 import Engine, Message
from notso.smollm3.conversion import hf_config
from notso.smollm3.conversion.converter import convert
from notso.smollm3.conversion.hf_tokenizer import PROBES, folder_tokenizer
from notso.smollm3.text.chat_template import ChatTemplate
from notso.smollm3.text.tokenizer import Tokenizer

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
def test_converted_folder_gives_the_logits_of_transformers(tmp_path: Path, case: FolderCase) -> None:
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


def test_every_installed_configuration_field_is_classified() -> None:
    """Fields that future versions of transformers add are rejected by name until they are classified."""
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


def test_folder_saved_by_transformers_is_converted(tmp_path: Path) -> None:
    folder = COMPUTED[0].write(tmp_path / "folder")
    model = load(folder)
    model.save_pretrained(tmp_path / "saved")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "chat_template.jinja").write_text((folder / "chat_template.jinja").read_text())
    convert(tmp_path / "saved", tmp_path / "made.gguf", "F32")


@pytest.mark.parametrize("name", TAKEN)
def test_token_ids_and_templates_match_transformers(tmp_path: Path, small_json: dict[str, Any], name: str) -> None:
    """Chat templates give the same text, too."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin_of_text|>", "eos_token": "<|im_end|>"}
    folder = write(tmp_path, small_json, TAKEN[name], config)
    (folder / "config.json").write_text(json.dumps(config_of(BASE)))
    template = "{{ bos_token }}{% for m in messages %}{{ m.role ~ ': ' ~ m.content + eos_token }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    entries = {key: value for key, (value, _) in folder_tokenizer(folder, 1300, []).items()}
    ours = Tokenizer.from_gguf(entries)
    for text in (*PROBES, "<|im_start|>user\ne\u0301 12345<|im_end|>\n<think>Ａ x</think>"):
        assert ours.encode(text, control=True) == theirs(text).input_ids, text
    chat = ChatTemplate.from_gguf(entries, ours)
    assert chat is not None
    said = [{"role": "user", "content": "It's 12345 o'clock."}, {"role": "assistant", "content": "Café."}]
    messages = [Message(each["role"], each["content"]) for each in said]  # type: ignore[arg-type]
    assert chat.render(messages) == theirs.apply_chat_template(said, tokenize=False)
    ids = theirs.apply_chat_template(said, tokenize=True, return_dict=False)
    assert chat.encode(ours, messages) == ids
