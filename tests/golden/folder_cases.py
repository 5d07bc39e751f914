"""Unusual model folders, and the expected result of each: computed as transformers does, or rejected with an error.

`tests/smollm3/conversion/test_unusual_folders.py` checks the results, and `tests/smollm3/tuning/test_folders.py`
compares computed ones with the installed transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from golden.random_models import RANDOM, RandomModel
from smollm3.conversion.hf_folder_of import write_folder, write_safetensors

BASE = replace(RANDOM, layers=4, hidden=256, ffn=256, heads=4, kv_heads=2, head_dim=64, vocab=400, context=128)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 5e6}


def _head(folder: Path, model: RandomModel, *, copy: bool = False, drop: str = "") -> None:
    """Add an lm_head to the single file: a copy of the embedding, or other values. `drop`: tensor to remove."""
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, body = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    tensors = {
        name: (each["dtype"], tuple(each["shape"]), body[slice(*each["data_offsets"])])
        for name, each in header.items()
        if name != "__metadata__"
    }
    embedding = tensors["model.embed_tokens.weight"]
    other = np.roll(np.frombuffer(embedding[2], "<f4"), model.hidden).tobytes()
    tensors["lm_head.weight"] = embedding if copy else (*embedding[:2], other)
    tensors.pop(drop, None)
    write_safetensors(path, tensors)


def _beside_shards(folder: Path, model: RandomModel) -> None:
    """Add shards of another model next to the single file."""
    other = write_folder(replace(model, seed=99), folder / "other", shards=2)
    for path in other.glob("model*"):
        path.rename(folder / path.name)
    for path in other.iterdir():
        path.unlink()
    other.rmdir()


def _old_frequencies(folder: Path, model: RandomModel) -> None:
    _head(folder, model, copy=True, drop="lm_head.weight")
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, body = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    at = len(body)
    header["model.layers.0.self_attn.rotary_emb.inv_freq"] = {
        "dtype": "F32",
        "shape": [2],
        "data_offsets": [at, at + 8],
    }
    head = json.dumps(header).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + body + bytes(8))


def _generation(**fields: Any) -> Callable[[Path, RandomModel], None]:
    return lambda folder, model: (folder / "generation_config.json").write_text(json.dumps(fields)) and None


@dataclass(frozen=True, slots=True)
class FolderCase:
    """A folder of BASE with changed fields of config.json, and with `change` applied. `refused`: words of the error, or
    "" if the folder is accepted. `context`: replaces the trained context."""

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    change: Callable[[Path, RandomModel], Any] = lambda folder, model: None
    refused: str = ""
    model: RandomModel = BASE

    def write(self, folder: Path) -> Path:
        """Write and return the folder."""
        write_folder(self.model, folder, **self.config)
        self.change(folder, self.model)
        return folder


def _yarn(name: str, **fields: Any) -> FolderCase:
    return FolderCase(f"YaRN, {name}", {"rope_parameters": YARN | fields, "rope_theta": None})


COMPUTED = [
    FolderCase("plain"),
    _yarn("plain"),
    _yarn("attention_factor", attention_factor=0.7),
    _yarn("attention_factor of nothing", attention_factor=None),
    _yarn("beta_fast", beta_fast=1.5),
    _yarn("beta_slow", beta_slow=0.25),
    _yarn("both betas and no truncation", beta_fast=16.0, beta_slow=0.5, truncate=False),
    _yarn("truncate null", truncate=None),
    _yarn("betas that leave no ramp", beta_fast=2.0, beta_slow=2.0, truncate=False),
    _yarn("betas the wrong way round", beta_fast=0.5, beta_slow=4.0),
    _yarn("mscale", mscale=1.5, mscale_all_dim=0.5),
    _yarn("mscale alone", mscale=1.5),
    _yarn("attention_factor beside mscale", attention_factor=1.25, mscale=1.5, mscale_all_dim=0.5),
    _yarn("factor null", factor=None),
    _yarn("factor 1", factor=1.0, attention_factor=0.8),
    _yarn("no original length", original_max_position_embeddings=128),
    FolderCase("YaRN of older folders", {
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16},
    }),
    FolderCase("both names of the scaling", {
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
        "rope_parameters": YARN,
    }),
    FolderCase("an original length outside", {"rope_parameters": YARN, "original_max_position_embeddings": 64}),
    FolderCase("default with leftovers", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "factor": 3}}),
    FolderCase("another head, tied", change=_head),
    FolderCase("another head, tie absent", {"tie_word_embeddings": True}, _head),
    FolderCase("the same head, tied", change=lambda folder, model: _head(folder, model, copy=True)),
    FolderCase("the same head, not tied", {"tie_word_embeddings": False},
               lambda folder, model: _head(folder, model, copy=True)),
    FolderCase("a head alone", change=lambda folder, model: _head(folder, model, drop="model.embed_tokens.weight")),
    FolderCase("untied", model=replace(BASE, tied=False)),
    FolderCase("one file beside shards", change=_beside_shards),
    FolderCase("frequencies of older folders", change=_old_frequencies),
    FolderCase("a longer list of layers", {"no_rope_layers": [1, 1, 1, 0, 1, 1, 1, 0]}),
    FolderCase("layers by their interval", {"no_rope_layers": None, "layer_types": None}),
    FolderCase("as many keys as queries", {"num_key_value_heads": None}, model=replace(BASE, kv_heads=4)),
    FolderCase("swish", {"hidden_act": "swish"}),
    FolderCase("a window that is off", {"sliding_window": 16, "max_window_layers": 2}),
    FolderCase("fields of training and versions", {
        "attention_dropout": 0.3, "use_cache": False, "pretraining_tp": 2, "transformers_version": "4.53.0",
        "torch_dtype": "float32", "initializer_range": 0.1, "unsloth_version": "2026.1", "rope_scaling": None,
        "_attn_implementation_autoset": True, "transformers.js_config": {"dtype": "q4"},
    }),
    FolderCase("other defaults of sampling", change=_generation(do_sample=True, temperature=1.3, top_k=20)),
]  # fmt: skip

REFUSED = [
    FolderCase("llama3", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, refused="type 'llama3' is not"),
    FolderCase("linear", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, refused="type 'linear' is not"),
    FolderCase("YaRN of tomorrow", {"rope_parameters": YARN | {"beta_middle": 3}}, refused="field 'beta_middle' is"),
    FolderCase("YaRN without a factor", {"rope_scaling": {"rope_type": "yarn"}}, refused="RoPE scaling has no factor"),
    FolderCase("an attention factor of nothing", {"rope_parameters": YARN | {"attention_factor": 0.0}},
               refused="RoPE scaling field attention_factor is out of range"),
    FolderCase("a part of each head", {"partial_rotary_factor": 0.5}, refused="is 0.5, which is not supported"),
    FolderCase("a window", {"use_sliding_window": True, "sliding_window": 16}, refused="use_sliding_window is True"),
    FolderCase("attention to what follows", {"is_causal": False}, refused="is_causal is False"),
    FolderCase("a field of tomorrow", {"residual_scale": 0.5}, refused="unknown field 'residual_scale'"),
    FolderCase("another class", {"architectures": ["SmolLM3ForSequenceClassification"]}, refused="architectures is"),
    FolderCase("an end that is no token", {"eos_token_id": 4000}, refused="eos_token_id 4000 is not"),
    FolderCase("tokens kept out", change=_generation(suppress_tokens=[5]), refused="'suppress_tokens' is \\[5\\]"),
    FolderCase("strings that stop", change=_generation(stop_strings=["\n"]), refused="'stop_strings'"),
    FolderCase("beams", change=_generation(num_beams=4), refused="num_beams is 4"),
    FolderCase("no head", {"tie_word_embeddings": False}, refused="has no tensor lm_head.weight"),
]  # fmt: skip
