"""Sampling parameters under llama.cpp's names."""

from __future__ import annotations

from typing import Any

from notso.smollm3 import PARAMETERS, SamplingParams

RANDOM_SEED = 0xFFFFFFFF
"""llama.cpp's value for a random seed per answer."""
_ORDER = (
    *("seed", "temperature", "dynatemp_range", "dynatemp_exponent", "top_k", "top_p", "min_p", "top_n_sigma"),
    *("typical_p", "xtc_probability", "xtc_threshold", "repeat_last_n", "repeat_penalty", "presence_penalty"),
    *("frequency_penalty", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n"),
    *("dry_sequence_breakers", "mirostat", "adaptive_target", "adaptive_decay", "stop", "max_tokens", "n_predict"),
    *("n_keep", "n_discard", "ignore_eos", "logit_bias"),
)
"""llama.cpp's order; others follow."""
_NOT_LLAMA_CPP = ("min_tokens", "stop_token_ids")


def generation_settings(params: SamplingParams) -> dict[str, Any]:
    """Return all parameters; samplers not supported appear as off."""
    named = {
        next(iter(spelled)): list(value) if isinstance(value := getattr(params, name), tuple) else value
        for name, each in PARAMETERS.items()
        if (spelled := each.names("openai")) and name not in _NOT_LLAMA_CPP
    }
    longest = -1 if params.max_tokens is None else params.max_tokens
    settings = named | {
        "seed": RANDOM_SEED if params.seed is None else params.seed,
        "dynatemp_range": 0.0,
        "dynatemp_exponent": 1.0,
        "top_n_sigma": -1.0,
        "repeat_last_n": params.penalty_window or -1,
        "mirostat": 0,
        "adaptive_target": -1.0,
        "adaptive_decay": 0.0,
        "max_tokens": longest,
        "n_predict": longest,
        "n_keep": 0,
        "n_discard": 0,
        "logit_bias": [{"token": token, "bias": bias} for token, bias in params.logit_bias.items()],
    }
    return {name: settings[name] for name in dict.fromkeys((*_ORDER, *settings))}
