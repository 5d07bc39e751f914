"""Fake quantization for training: round weights approximately as Q4_K and Q6_K do, without quantizing the scales."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def like_q4_k(weight: torch.Tensor) -> torch.Tensor:
    """Round to 4 bits, with a scale and a minimum for each 32 weights of a row."""
    groups = weight.reshape(-1, 32)
    low = groups.amin(1, keepdim=True).clamp(max=0)
    step = (groups.amax(1, keepdim=True) - low).clamp(min=1e-8) / 15
    return (((groups - low) / step).round().clamp(0, 15) * step + low).reshape(weight.shape)


def like_q6_k(weight: torch.Tensor) -> torch.Tensor:
    """Round to 6 bits (signed), with a scale for each 16 weights of a row."""
    groups = weight.reshape(-1, 16)
    step = groups.abs().amax(1, keepdim=True).clamp(min=1e-8) / 31
    return ((groups / step).round().clamp(-32, 31) * step).reshape(weight.shape)


def is_q6_k(name: str, layers: int) -> bool:
    """Return whether llama.cpp's Q4_K_M mix has this matrix in Q6_K.

    These are the embedding, and v and down in the first and last eighth of the layers and in every third layer between.
    """
    if "embed" in name:
        return True
    if not ("v_proj" in name or "down_proj" in name):
        return False
    layer = int(name.split("layers.")[1].split(".")[0])
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


@contextmanager
def quantized_weights(model: torch.nn.Module, enabled: bool) -> Iterator[None]:
    """Replace matrices by their quantized values within the context, for a straight-through gradient."""
    if not enabled:
        yield
        return
    layers = len(model.model.layers)
    kept: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                kept[name] = parameter.detach().clone()
                parameter.copy_(like_q6_k(parameter) if is_q6_k(name, layers) else like_q4_k(parameter))
    yield
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in kept:
                parameter.copy_(kept[name])
