"""Convert a folder's config.json and generation_config.json to GGUF entries.

Fields are accepted if this module applies them as transformers does, or if they cannot change this engine's results.
Defaults for requests are ignored; any other field must have a value that means "off". Source: transformers 5.24,
SmolLM3Config, modeling_rope_utils and GenerationConfig.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from notso.smollm3.config import (
    ARCHITECTURE,
    FLOAT_LIMITS,
    NO_ROPE_LAYER_INTERVAL,
    TRUNCATE_KEY,
    YarnRamp,
    yarn_attention_factor,
)
from notso.smollm3.errors import ModelFileError, quoted
from notso.smollm3.strict_json import OFF, is_one_of
from notso.text_file import read_regular

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
MAX_CONFIG_BYTES = 1 << 20
MAX_VOCAB = 1_000_000
# JSON integers can exceed the range of a float, and Python's parser accepts NaN.
MAX_NUMBER = 1e30

# Fields that must have one of these values if they are present.
FIXED: Mapping[str, tuple[Any, ...]] = {
    "model_type": (ARCHITECTURE,),
    "architectures": (["SmolLM3ForCausalLM"], None),
    "hidden_act": ("silu", "swish", None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "quantization_config": (None,),
    "partial_rotary_factor": (1.0, None),
    "tie_word_embeddings": (True, False),
    "is_encoder_decoder": (False, None),
    "is_causal": (True, None),
}

# GGUF key, without the prefix `smollm3.` -> field of config.json
_INTEGERS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "vocab_size": "vocab_size",
}

COMPUTED = frozenset(
    {
        *FIXED,
        *_INTEGERS.values(),
        *("head_dim", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "eos_token_id"),
        *("original_max_position_embeddings", "no_rope_layers", "no_rope_layer_interval", "layer_types"),
    }
)

# Fields that cannot change the results of this engine.
HARMLESS = frozenset(
    {
        # settings of training and memory use, and of what a model call returns
        *("attention_dropout", "initializer_range", "use_cache", "pretraining_tp", "output_attentions", "return_dict"),
        *("output_hidden_states", "chunk_size_feed_forward", "torchscript", "dtype", "torch_dtype"),
        *("attn_implementation", "_attn_implementation", "_attn_implementation_internal", "experts_implementation"),
        *("_attn_implementation_autoset", "transformers.js_config"),
        # names, versions, and remote code, which is never executed
        *("_name_or_path", "name_or_path", "transformers_version", "auto_map", "tokenizer_class"),
        *("unsloth_fixed", "unsloth_version", "finetuning_task", "task_specific_params", "_commit_hash"),
        # settings of the output heads of other model classes
        *("id2label", "label2id", "num_labels", "problem_type"),
        # used only if use_sliding_window is true
        *("sliding_window", "max_window_layers"),
        # unused, because the tokenizer adds no special tokens, and sequences are not padded
        *("bos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"),
    }
)

# Fields of rope_scaling and rope_parameters that are supported.
YARN_COMPUTED = frozenset(
    {
        *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"),
        *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    }
)

# Fields of generation_config.json that cannot change the results of this engine.
GENERATION_HARMLESS = frozenset(
    {
        *("_from_model_config", "transformers_version", "_commit_hash", "bos_token_id", "pad_token_id", "use_cache"),
        *("early_stopping", "max_cache_len", "num_assistant_tokens", "num_assistant_tokens_schedule"),
        *("assistant_confidence_threshold", "prompt_lookup_num_tokens", "max_matching_ngram_size"),
        *("assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight"),
        *("speculation_type", "continuous_batching_config"),
        *("decoder_start_token_id", "cache_implementation", "cache_config", "return_dict_in_generate", "output_scores"),
        *("output_logits", "output_attentions", "output_hidden_states", "prefill_chunk_size", "disable_compile"),
        *("compile_config", "low_memory", "is_assistant", "num_return_sequences"),
    }
)

# Defaults for requests. They are logged and ignored, because requests and server settings determine these values.
GENERATION_CHOSEN = frozenset(
    {
        *("do_sample", "temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty"),
        *("max_length", "max_new_tokens", "max_time"),
    }
)

# Unsupported fields of generation_config.json, and the values at which they have no effect.
GENERATION_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "penalty_alpha": (0.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "top_h": (1.0,),
    "guidance_scale": (1.0,),
    "length_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "diversity_penalty": (0.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
}

# Key -> (value, GGUF type name), the arguments of `GGUFWriter.add`.
Entries = dict[str, tuple[Any, str]]

_log = logging.getLogger(__name__)


def read_object(
    folder: Path, name: str, most_bytes: int = MAX_CONFIG_BYTES, *, is_optional: bool = False
) -> dict[str, Any]:
    """Return the JSON object in a file, or {} if it is optional and missing. Raises ModelFileError."""
    try:
        found = json.loads(read_regular(folder / name, most_bytes))
    except OSError as error:
        if is_optional and isinstance(error, FileNotFoundError):
            return {}
        raise ModelFileError(f"{folder}: cannot read {name}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ModelFileError(f"{name} is not valid JSON") from None
    if not isinstance(found, dict):
        raise ModelFileError(f"{name} is not a JSON object")
    return found


def config_entries(config: Mapping[str, Any]) -> Entries:
    """Return the `smollm3.*` entries. Raises ModelFileError."""
    for name, value in config.items():
        if name in FIXED:
            if not is_one_of(value, FIXED[name]):
                raise ModelFileError(f"{CONFIG}: {name} is {quoted(value)}, which is not supported")
        elif name not in COMPUTED and name not in HARMLESS and value not in OFF:
            raise ModelFileError(f"{CONFIG}: unknown field {quoted(name)}, which could change the model's output")
    if "model_type" not in config:
        raise ModelFileError(f"{CONFIG}: model_type is missing")
    _check_layers(config)
    entries: Entries = {}
    heads = config.get("num_attention_heads")
    numbers = {name: config.get(name) for name in _INTEGERS.values()}
    if "num_key_value_heads" in config and numbers["num_key_value_heads"] is None:
        numbers["num_key_value_heads"] = heads  # as in SmolLM3Config
    for key, name in _INTEGERS.items():
        value = numbers[name]
        if type(value) is not int or not 0 < value < 1 << 31:
            raise ModelFileError(f"{CONFIG}: {name} must be a positive integer, not {quoted(value)}")
        entries[f"{ARCHITECTURE}.{key}"] = value, "uint32"
    if config["vocab_size"] > MAX_VOCAB:
        raise ModelFileError(f"{CONFIG}: vocab_size exceeds the maximum of {MAX_VOCAB:,}")
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head_dim = config.get("head_dim") or hidden // heads
    if type(head_dim) is not int or head_dim < 2 or head_dim % 2 or heads % numbers["num_key_value_heads"]:
        raise ModelFileError(
            f"{CONFIG}: head_dim must be even and positive, and num_attention_heads a multiple of num_key_value_heads"
        )
    entries[f"{ARCHITECTURE}.rope.dimension_count"] = head_dim, "uint32"
    if head_dim * heads != hidden:
        for key in ("key_length", "value_length"):
            entries[f"{ARCHITECTURE}.attention.{key}"] = head_dim, "uint32"
    rope = _rope(config)
    entries[f"{ARCHITECTURE}.rope.freq_base"] = _number("rope_theta", rope["rope_theta"]), "float32"
    epsilon = _number("rms_norm_eps", config.get("rms_norm_eps"))
    entries[f"{ARCHITECTURE}.attention.layer_norm_rms_epsilon"] = epsilon, "float32"
    return entries | _scaling(config, rope)


def end_tokens(folder: Path, config: Mapping[str, Any]) -> list[int]:
    """Return the distinct end token ids, with those of generation_config.json first. Raises ModelFileError."""
    generation = read_object(folder, GENERATION_CONFIG, is_optional=True)
    ignored = []
    for name, value in generation.items():
        if name in GENERATION_CHOSEN:
            ignored += [f"{name} {quoted(value)}"] if value is not None else []
        elif name in GENERATION_NEUTRAL:
            if value is not None and not is_one_of(value, GENERATION_NEUTRAL[name]):
                raise ModelFileError(f"{GENERATION_CONFIG}: {name} is {quoted(value)}, which is not supported")
        elif name != "eos_token_id" and name not in GENERATION_HARMLESS and value not in OFF:
            raise ModelFileError(f"{GENERATION_CONFIG}: {quoted(name)} is {quoted(value)}, which is not supported")
    if ignored:
        _log.info(
            "%s: these fields are ignored, because requests and server settings override them: %s",
            GENERATION_CONFIG,
            ", ".join(ignored),
        )
    ids: dict[int, None] = {}
    for file, settings in ((GENERATION_CONFIG, generation), (CONFIG, config)):
        found = settings.get("eos_token_id")
        for each in found if isinstance(found, list) else [] if found is None else [found]:
            if type(each) is not int or not 0 <= each < config["vocab_size"]:
                raise ModelFileError(f"{file}: eos_token_id {quoted(each)} is not a token id")
            ids[each] = None
    return list(ids)


def _check_layers(config: Mapping[str, Any]) -> None:
    layers, flags = config.get("num_hidden_layers"), config.get("no_rope_layers")
    # The architecture determines which layers have no position encoding; a GGUF file cannot specify other layers.
    if config.get("no_rope_layer_interval", NO_ROPE_LAYER_INTERVAL) != NO_ROPE_LAYER_INTERVAL:
        raise ModelFileError(f"{CONFIG}: no_rope_layer_interval must be {NO_ROPE_LAYER_INTERVAL}")
    if flags is not None and isinstance(layers, int):
        expected = [int((layer + 1) % NO_ROPE_LAYER_INTERVAL != 0) for layer in range(min(layers, 4096))]
        if not isinstance(flags, list) or flags[: len(expected)] != expected:  # the list may be longer
            multiples = ", ".join(str(number * NO_ROPE_LAYER_INTERVAL) for number in (1, 2, 3))
            raise ModelFileError(
                f"{CONFIG}: no_rope_layers must be 0 for layers {multiples}, ... (counted from 1) and 1 for the others"
            )
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or set(map(str, kinds)) - {"full_attention"}):
        raise ModelFileError(f"{CONFIG}: layer_types must contain only full_attention")


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    # Older versions of transformers write rope_scaling, newer ones rope_parameters.
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ModelFileError(f"{CONFIG}: rope_scaling and rope_parameters must be JSON objects")
    for name, value in rope.items():
        if name not in YARN_COMPUTED and value not in OFF and _rope_type(rope) in ("default", "yarn"):
            raise ModelFileError(f"{CONFIG}: RoPE scaling field {quoted(name)} is not supported")
    if rope.get("partial_rotary_factor") not in (None, 1.0):
        raise ModelFileError(f"{CONFIG}: partial_rotary_factor must be 1, not {quoted(rope['partial_rotary_factor'])}")
    return {"rope_theta": config.get("rope_theta"), **rope}


def _rope_type(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


def _scaling(config: Mapping[str, Any], rope: Mapping[str, Any]) -> Entries:
    kind = _rope_type(rope)
    if kind == "default":
        return {}
    if kind != "yarn":
        raise ModelFileError(
            f"{CONFIG}: RoPE scaling of type {quoted(kind)} is not supported; the only supported type is yarn"
        )
    context = config["max_position_embeddings"]
    original = config.get("original_max_position_embeddings")  # takes precedence over `rope`, as in transformers
    original = rope.get("original_max_position_embeddings", context) if original is None else original
    if type(original) is not int or not 0 < original < 1 << 31:
        raise ModelFileError(
            f"{CONFIG}: original_max_position_embeddings must be a positive integer, not {quoted(original)}"
        )
    if "factor" not in rope:
        raise ModelFileError(f"{CONFIG}: RoPE scaling has no factor")
    factor = context / original if rope["factor"] is None else _number("factor", rope["factor"])
    _check_range("rope.scaling.factor", "factor", factor)
    usual = yarn_attention_factor(factor)
    attention = rope.get("attention_factor")
    if attention is not None:
        attention = _number("attention_factor", attention)
    else:
        mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
        attention = usual
        if mscale and all_dim:
            above, below = (
                1.0 + _number(name, value) * (usual - 1.0)
                for name, value in (("mscale", mscale), ("mscale_all_dim", all_dim))
            )
            attention = above / below if below else 0.0
    prefix = f"{ARCHITECTURE}.rope.scaling"
    entries: Entries = {
        f"{prefix}.type": ("yarn", "string"),
        f"{prefix}.factor": (factor, "float32"),
        f"{prefix}.original_context_length": (original, "uint32"),
    }
    if attention != usual:
        _check_range("rope.scaling.attn_factor", "attention_factor", attention / usual)
        entries[f"{prefix}.attn_factor"] = attention / usual, "float32"
    for name in ("beta_fast", "beta_slow"):
        beta = rope.get(name)
        if beta:  # 0 means unset, as in transformers
            _check_range(f"rope.scaling.yarn_{name}", name, _number(name, beta))
            entries[f"{prefix}.yarn_{name}"] = float(beta), "float32"
    truncate = rope.get("truncate", YarnRamp().truncate)
    if truncate not in (True, False, None):
        raise ModelFileError(f"{CONFIG}: truncate must be true or false, not {quoted(truncate)}")
    if not truncate:
        entries[f"{ARCHITECTURE}.{TRUNCATE_KEY}"] = False, "bool"
    return entries


def _check_range(key: str, name: str, value: float) -> None:
    low, high = FLOAT_LIMITS[key]
    if not low <= value <= high:
        raise ModelFileError(f"{CONFIG}: RoPE scaling field {name} is out of range")


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_NUMBER:
        raise ModelFileError(f"{CONFIG}: {name} must be a number, not {quoted(value)}")
    return float(value)
