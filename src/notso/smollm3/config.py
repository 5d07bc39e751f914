"""Read a SmolLM3 model's configuration from a GGUF file's metadata. Most field names are Hugging Face's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from notso.smollm3.errors import ModelFileError, quoted

ARCHITECTURE = "smollm3"

# Every fourth layer has no position encoding. GGUF files do not contain this interval, because it is part of the
# architecture (transformers' SmolLM3Config.no_rope_layer_interval; llama.cpp hard-codes it as well).
NO_ROPE_LAYER_INTERVAL = 4

# Accepted range of each integer key: (lowest, highest).
LIMITS = {
    "block_count": (1, 256),
    "embedding_length": (1, 32_768),
    "feed_forward_length": (1, 131_072),
    "attention.head_count": (1, 256),
    "attention.head_count_kv": (1, 256),
    "attention.key_length": (1, 1_024),
    "attention.value_length": (1, 1_024),
    "rope.dimension_count": (1, 1_024),
    "vocab_size": (1, 1_000_000),
    "context_length": (1, 1_048_576),
    "rope.scaling.original_context_length": (1, 1_048_576),
}

# Accepted range of each float key. More extreme values could cause overflows or divisions by zero.
FLOAT_LIMITS = {
    "attention.layer_norm_rms_epsilon": (1e-12, 1.0),
    "rope.freq_base": (2.0, 1e12),
    "rope.scaling.factor": (1.0, 64.0),
    "rope.scaling.attn_factor": (1e-3, 1e3),
    "rope.scaling.yarn_beta_fast": (1e-3, 1e6),
    "rope.scaling.yarn_beta_slow": (1e-3, 1e6),
}

# Values at which `rope.scaling.*` keys have no effect.
NEUTRAL_SCALING = {
    **{"type": "none", "factor": 1.0, "attn_factor": 1.0, "finetuned": True},
    **{"yarn_ext_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_log_multiplier": 0.0},
}

_YARN_KEYS = {
    *("type", "factor", "original_context_length", "attn_factor", "yarn_beta_fast", "yarn_beta_slow", "yarn_truncate"),
}

# Rotary position embedding rotates pairs of values, each pair at its own speed. To extend the context, YaRN slows down
# the slow pairs and leaves the fast pairs unchanged. For the pairs in between (the ramp), it interpolates linearly.
# This key specifies whether the start and the end of the ramp are rounded to pair indices. Only this project uses the
# key; llama.cpp always rounds the start and the end.
TRUNCATE_KEY = "rope.scaling.yarn_truncate"

YARN_FACTOR = 2.0


@dataclass(frozen=True, slots=True)
class YarnRamp:
    """Start and end of YaRN's ramp, and an additional factor for cosine and sine."""

    # The ramp starts at the pair that makes `beta_fast` turns over the original context, and ends at the pair that
    # makes `beta_slow` turns.
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attn_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class SmolLM3Config:
    """Model dimensions and constants."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    # The name is Hugging Face's. Despite the name, 1 means that the layer has rotary position embedding.
    no_rope_layers: tuple[int, ...]
    # YaRN's factor and the original context in tokens, if the file specifies YaRN.
    yarn_of_file: tuple[float, int] | None = None
    # To detect incompatible caches, kv/model_identity.py hashes this object's repr() and the RoPE frequencies. The
    # frequencies depend on the ramp, so repr() need not contain the ramp.
    yarn_ramp: YarnRamp = field(default=YarnRamp(), repr=False)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> SmolLM3Config:
        """Parse metadata. Raises ModelFileError."""
        parts = metadata.get("split.count")
        if isinstance(parts, int) and parts > 1:
            raise ModelFileError(f"it is one of {parts} parts of a model; merge them with llama-gguf-split --merge")
        architecture = metadata.get("general.architecture")
        if architecture != ARCHITECTURE:
            raise ModelFileError(f"general.architecture is {quoted(architecture)}; supported: {ARCHITECTURE!r}")
        hidden = _integer(metadata, "embedding_length")
        layers = _integer(metadata, "block_count")
        heads = _integer(metadata, "attention.head_count")
        kv_heads = _integer(metadata, "attention.head_count_kv", heads)
        if heads % kv_heads:
            raise ModelFileError(f"{heads} attention heads cannot share {kv_heads} key-value heads")
        head_dim = _integer(metadata, "attention.key_length", hidden // heads)
        if head_dim % 16:
            raise ModelFileError(f"a head dimension of {head_dim} is not supported; it must be a multiple of 16")
        for key in ("attention.value_length", "rope.dimension_count"):
            if _integer(metadata, key, head_dim) != head_dim:
                raise ModelFileError(f"{ARCHITECTURE}.{key} differs from the head dimension {head_dim}")
        vocab = _vocab_size(metadata)
        yarn_of_file, yarn_ramp = _yarn(metadata)
        return cls(
            hidden_size=hidden,
            intermediate_size=_integer(metadata, "feed_forward_length"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=vocab,
            max_position_embeddings=_integer(metadata, "context_length"),
            rms_norm_eps=_number(metadata, "attention.layer_norm_rms_epsilon"),
            rope_theta=_number(metadata, "rope.freq_base"),
            no_rope_layers=tuple(int((layer + 1) % NO_ROPE_LAYER_INTERVAL != 0) for layer in range(layers)),
            yarn_of_file=yarn_of_file,
            yarn_ramp=yarn_ramp,
        )

    def uses_rope(self, layer: int) -> bool:
        return self.no_rope_layers[layer] == 1

    @property
    def nope_layers(self) -> tuple[int, ...]:
        """Layers without position encoding: 3, 7, 11, ..."""
        return tuple(layer for layer in range(self.num_hidden_layers) if not self.uses_rope(layer))

    @property
    def kv_values_per_token(self) -> int:
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim

    @property
    def max_context_tokens(self) -> int:
        if self.yarn_of_file is None:
            # Longer contexts would require larger factors, with which YaRN has not been tested.
            return int(YARN_FACTOR * self.max_position_embeddings)
        factor, original = self.yarn_of_file
        return max(self.max_position_embeddings, int(factor * original))

    def uses_yarn(self, context_tokens: int) -> bool:
        # If the file specifies YaRN, it applies at every context length, as in transformers and llama.cpp.
        return self.yarn_of_file is not None or context_tokens > self.max_position_embeddings

    def rope_frequencies(self, context_tokens: int) -> tuple[list[float], float]:
        """Return each pair's rotation per position in radians, and the factor for cosine and sine."""
        half = self.head_dim // 2
        plain = [self.rope_theta ** (-2 * i / self.head_dim) for i in range(half)]
        factor, original = self.yarn_of_file or (YARN_FACTOR, self.max_position_embeddings)
        if not self.uses_yarn(context_tokens):
            return plain, 1.0
        # YaRN divides the low frequencies by the factor (transformers' _compute_yarn_parameters; Peng et al. 2023,
        # section 3.2).
        yarn = self.yarn_ramp
        low: float = self._pair_with_turns(yarn.beta_fast, original)
        high: float = self._pair_with_turns(yarn.beta_slow, original)
        if yarn.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.head_dim - 1)
        ramp = [min(max((i - low) / ((high - low) or 1e-3), 0.0), 1.0) for i in range(half)]
        mixed = [w * (1 - g) + w / factor * g for w, g in zip(plain, ramp, strict=True)]
        return mixed, yarn.attn_factor * yarn_attention_factor(factor)

    def _pair_with_turns(self, turns: float, tokens: int) -> float:
        # Returns the index (usually fractional) of the pair that makes `turns` turns over `tokens` positions.
        ratio = tokens / (turns * 2 * math.pi)
        return self.head_dim * math.log(ratio) / (2 * math.log(self.rope_theta))


def yarn_attention_factor(factor: float) -> float:
    """Return YaRN's factor for cosine and sine (Peng et al. 2023, section 3.4)."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _yarn(metadata: Mapping[str, Any]) -> tuple[tuple[float, int] | None, YarnRamp]:
    prefix = f"{ARCHITECTURE}.rope.scaling."
    scaling = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    found, ramp = None, YarnRamp()
    if scaling.get("type") == "yarn":
        context = _integer(metadata, "context_length")
        original = _integer(metadata, "rope.scaling.original_context_length", context)
        found = _number(metadata, "rope.scaling.factor"), original
        truncate = metadata.get(f"{ARCHITECTURE}.{TRUNCATE_KEY}", ramp.truncate)
        if not isinstance(truncate, bool):
            raise ModelFileError(f"{ARCHITECTURE}.{TRUNCATE_KEY} must be true or false")
        ramp = YarnRamp(
            beta_fast=_number(metadata, "rope.scaling.yarn_beta_fast", ramp.beta_fast),
            beta_slow=_number(metadata, "rope.scaling.yarn_beta_slow", ramp.beta_slow),
            truncate=truncate,
            attn_factor=_number(metadata, "rope.scaling.attn_factor", ramp.attn_factor),
        )
        scaling = {name: value for name, value in scaling.items() if name not in _YARN_KEYS}
    linear = metadata.get(f"{ARCHITECTURE}.rope.scale_linear", 1.0)  # a key of older files; llama.cpp reads it too
    if linear != 1.0:
        raise ModelFileError(
            f"{ARCHITECTURE}.rope.scale_linear is {quoted(linear)}; the only supported RoPE scaling is YaRN"
        )
    for name, value in scaling.items():
        if name not in NEUTRAL_SCALING or value != NEUTRAL_SCALING[name]:
            raise ModelFileError(f"{quoted(prefix + name)} is {quoted(value)}; the only supported RoPE scaling is YaRN")
    return found, ramp


def _integer(metadata: Mapping[str, Any], key: str, default: int | None = None) -> int:
    name = f"{ARCHITECTURE}.{key}"
    value = metadata.get(name, default)
    if value is None:
        raise ModelFileError(f"the file has no {name}")
    low, high = LIMITS[key]
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ModelFileError(f"{name} must be an integer from {low} to {high}")
    return value


def _number(metadata: Mapping[str, Any], key: str, default: float | None = None) -> float:
    name = f"{ARCHITECTURE}.{key}"
    value = metadata.get(name, default)
    low, high = FLOAT_LIMITS[key]
    if not isinstance(value, float) or not low <= value <= high:
        raise ModelFileError(f"{name} must be a number from {low:g} to {high:g}")
    return value


def _vocab_size(metadata: Mapping[str, Any]) -> int:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ModelFileError("the file has no tokenizer.ggml.tokens")
    if _integer(metadata, "vocab_size", len(tokens)) != len(tokens):
        raise ModelFileError(f"{ARCHITECTURE}.vocab_size differs from the {len(tokens)} tokens of the tokenizer")
    return len(tokens)
