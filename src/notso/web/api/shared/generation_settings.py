"""Sampling parameters under llama.cpp's names."""

from __future__ import annotations

from typing import Any

from notso.smollm3 import SamplingParams

RANDOM_SEED = 0xFFFFFFFF
"""llama.cpp's value for a random seed per answer."""


def generation_settings(params: SamplingParams) -> dict[str, Any]:
    """Return all parameters; samplers not supported appear as off."""
    longest = -1 if params.max_tokens is None else params.max_tokens
    return {
        "seed": RANDOM_SEED if params.seed is None else params.seed,
        "temperature": params.temperature,
        "dynatemp_range": 0.0,
        "dynatemp_exponent": 1.0,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "top_n_sigma": -1.0,
        "typical_p": params.typical_p,
        "xtc_probability": params.xtc_probability,
        "xtc_threshold": params.xtc_threshold,
        "repeat_last_n": params.penalty_window or -1,
        "repeat_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "dry_multiplier": params.dry_multiplier,
        "dry_base": params.dry_base,
        "dry_allowed_length": params.dry_allowed_length,
        "dry_penalty_last_n": params.dry_penalty_last_n,
        "dry_sequence_breakers": list(params.dry_sequence_breakers),
        "mirostat": 0,
        "adaptive_target": -1.0,
        "adaptive_decay": 0.0,
        "stop": list(params.stop),
        "max_tokens": longest,
        "n_predict": longest,
        "n_keep": 0,
        "n_discard": 0,
        "ignore_eos": params.ignore_eos,
        "logit_bias": [{"token": token, "bias": bias} for token, bias in params.logit_bias.items()],
    }
