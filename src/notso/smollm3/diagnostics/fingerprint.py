"""One short hash of what a model computes: the same file has the same one on every machine, family and device.

Kernels give the same bits everywhere: where the hashes of two people differ, so do their files, cache formats or
releases of this engine, or there is a fault to report.
"""

from __future__ import annotations

import hashlib

from notso.smollm3.engine.engine import Engine
from notso.smollm3.values.sampling_params import SamplingParams

IDS, WRITTEN = 48, 16
"""Tokens that are read, the same for a vocabulary of one size, and written after them."""

HEX_DIGITS = 16


def model_fingerprint(engine: Engine) -> str:
    """Of the bits of all logits of a fixed prompt, and of the text of a greedy answer to it."""
    vocab = engine.config.vocab_size
    ids = [(17 + 7919 * at) % vocab for at in range(IDS)]
    greedy = SamplingParams(temperature=0.0, max_tokens=WRITTEN, ignore_eos=True)
    said = "".join(event.text for event in engine.generate(ids, greedy))
    return _hash(engine.logits(ids).astype("<f4", copy=False).tobytes() + said.encode())


def answer_fingerprint(*texts: str) -> str:
    """Of an answer's parts: its thinking, its text."""
    return _hash("\0".join(texts).encode("utf-8", "surrogatepass"))


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:HEX_DIGITS]
