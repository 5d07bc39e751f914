"""Block format of each tensor in the known quantization mixes."""

from __future__ import annotations

from notso.qtensor import F32, FORMATS_BY_NAME, Q4_K, Q5_K, Q6_K, Format

Q4_K_M, Q5_K_M = "Q4_K_M", "Q5_K_M"
# Format of most matrices in a mix; the others are Q6_K.
MIXED = {Q4_K_M: Q4_K, Q5_K_M: Q5_K}

# ggml's `general.file_type` numbers.
FILE_TYPES = {
    **{"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K": 11, "Q4_K": 14},
    **{"Q5_K": 16, "Q6_K": 18, "IQ2_XXS": 19, "IQ2_XS": 20, "IQ3_XXS": 23, "IQ1_S": 24, "IQ4_NL": 25, "IQ3_S": 26},
    **{"IQ2_S": 28, "IQ4_XS": 30, "IQ1_M": 31, "BF16": 32, "TQ1_0": 36, "TQ2_0": 37, "MXFP4": 38, Q4_K_M: 15},
    Q5_K_M: 17,
}


def has_more_bits(layer: int, layers: int) -> bool:
    """Whether attn_v and ffn_down use Q6_K (llama.cpp: use_more_bits)."""
    # The outer eighths, and every third layer in between, with integer division.
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def format_in(mix: str, name: str, sides: int, layers: int, *, is_tied: bool) -> Format:
    """Return the format of a tensor, named without `.weight`."""
    if sides == 1:
        return F32
    if mix not in MIXED:
        return FORMATS_BY_NAME[mix]
    # The matrix that produces the logits has more bits: the head, or a tied embedding.
    if name == "token_embd":
        return Q6_K if is_tied else MIXED[mix]
    if name == "output":
        return Q6_K
    _, layer, role = name.split(".")
    return Q6_K if role in ("attn_v", "ffn_down") and has_more_bits(int(layer), layers) else MIXED[mix]
