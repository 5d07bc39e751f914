"""A folder's config.json as the entries of a GGUF file. What this engine would compute otherwise is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from notso.smollm3.config import ARCHITECTURE, NO_ROPE_LAYER_INTERVAL
from notso.smollm3.errors import ModelFileError, quoted

MAX_CONFIG_BYTES = 1 << 20
MAX_VOCAB = 1_000_000
MAX_NUMBER = 1e30
"""JSON has whole numbers that no float holds, and Python's reads NaN."""

FIXED: Mapping[str, tuple[Any, ...]] = {
    "model_type": (ARCHITECTURE,),
    "hidden_act": ("silu", None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "quantization_config": (None,),
}
"""What a SmolLM3 may say of itself, None where it says nothing."""

_INTEGERS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "vocab_size": "vocab_size",
}

Entries = dict[str, tuple[Any, str]]
"""Key -> (value, its type's name), as `GGUFWriter.add` takes them."""


def read_config(folder: Path) -> dict[str, Any]:
    """The object in config.json. Raises ModelFileError."""
    path = folder / "config.json"
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ModelFileError(f"config.json has more than {MAX_CONFIG_BYTES >> 20} MiB")
        config = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ModelFileError(f"{folder} has no config.json that can be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ModelFileError("config.json is not JSON") from None
    if not isinstance(config, dict):
        raise ModelFileError("config.json holds no object")
    return config


def config_entries(config: Mapping[str, Any]) -> Entries:
    """The keys `smollm3.*`. Raises ModelFileError naming what is missing, of another type, or of another model."""
    for name, allowed in FIXED.items():
        if config.get(name) not in allowed:
            raise ModelFileError(f"config.json: {name} is {quoted(config[name])}, which is not computed")
    _check_layers(config)
    entries: Entries = {}
    for key, name in _INTEGERS.items():
        value = config.get(name)
        if type(value) is not int or not 0 < value < 1 << 31:
            raise ModelFileError(f"config.json: {name} is {quoted(value)}, no whole number above 0")
        entries[f"{ARCHITECTURE}.{key}"] = value, "uint32"
    if config["vocab_size"] > MAX_VOCAB:
        raise ModelFileError(f"config.json: vocab_size is more than the {MAX_VOCAB:,} tokens that a GGUF file can list")
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head_dim = config.get("head_dim") or hidden // heads
    if type(head_dim) is not int or head_dim < 2 or head_dim % 2 or heads % config["num_key_value_heads"]:
        raise ModelFileError("config.json: its heads have no size that can be rotated, or cannot be shared")
    entries[f"{ARCHITECTURE}.rope.dimension_count"] = head_dim, "uint32"
    if head_dim * heads != hidden:
        for key in ("key_length", "value_length"):
            entries[f"{ARCHITECTURE}.attention.{key}"] = head_dim, "uint32"
    rope = _rope(config)
    entries[f"{ARCHITECTURE}.rope.freq_base"] = _number("rope_theta", rope["rope_theta"]), "float32"
    epsilon = _number("rms_norm_eps", config.get("rms_norm_eps"))
    entries[f"{ARCHITECTURE}.attention.layer_norm_rms_epsilon"] = epsilon, "float32"
    return entries | _scaling(rope)


def _check_layers(config: Mapping[str, Any]) -> None:
    """Which layers have no position encoding is the architecture's, not a file's: a GGUF cannot say it."""
    layers = config.get("num_hidden_layers")
    if config.get("no_rope_layer_interval", NO_ROPE_LAYER_INTERVAL) != NO_ROPE_LAYER_INTERVAL:
        raise ModelFileError(f"config.json: no_rope_layer_interval must be {NO_ROPE_LAYER_INTERVAL}")
    given = config.get("no_rope_layers")
    if given is not None and isinstance(layers, int):
        expected = [int((layer + 1) % NO_ROPE_LAYER_INTERVAL != 0) for layer in range(min(layers, 4096))]
        if given != expected:
            raise ModelFileError(f"config.json: no_rope_layers leaves out other layers than every {_fourth()}")
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or set(map(str, kinds)) - {"full_attention"}):
        raise ModelFileError("config.json: layer_types must be full_attention")


def _fourth() -> str:
    return f"{NO_ROPE_LAYER_INTERVAL}th"


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Theta and scaling, from where older and newer transformers write them."""
    newer = config.get("rope_parameters")
    older = config.get("rope_scaling")
    given = newer if isinstance(newer, dict) else older if isinstance(older, dict) else {}
    return {
        "rope_theta": config.get("rope_theta"),
        **{name: value for name, value in given.items() if value is not None},
    }


def _scaling(rope: Mapping[str, Any]) -> Entries:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {}
    original = rope.get("original_max_position_embeddings")
    if kind != "yarn" or type(original) is not int:
        raise ModelFileError(
            f"config.json: a rope scaling of type {quoted(kind)} is not computed; yarn is, with its length"
        )
    prefix = f"{ARCHITECTURE}.rope.scaling"
    return {
        f"{prefix}.type": ("yarn", "string"),
        f"{prefix}.factor": (_number("factor", rope.get("factor")), "float32"),
        f"{prefix}.original_context_length": (original, "uint32"),
    }


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_NUMBER:
        raise ModelFileError(f"config.json: {name} is {quoted(value)}, no number")
    return float(value)
