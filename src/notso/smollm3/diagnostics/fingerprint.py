"""Short hash of what a model computes, equal on every machine, kernel family and device.

Kernels are bit-exact everywhere: different hashes mean different files, cache formats or releases, or a fault.
"""

from __future__ import annotations

import hashlib

from notso.smollm3.engine.engine import Engine
from notso.smollm3.values.sampling_params import SamplingParams

# Prompt tokens, which depend only on the vocabulary size, and tokens generated after them.
IDS, WRITTEN = 48, 16

HEX_DIGITS = 16


def model_fingerprint(engine: Engine) -> str:
    """Hash the logits of a fixed prompt and a greedy answer."""
    vocab = engine.config.vocab_size
    ids = [(17 + 7919 * at) % vocab for at in range(IDS)]
    greedy = SamplingParams(temperature=0.0, max_tokens=WRITTEN, ignore_eos=True)
    said = "".join(event.text for event in engine.generate(ids, greedy))
    return _hash(engine.logits(ids).astype("<f4", copy=False).tobytes() + said.encode())


def answer_fingerprint(*texts: str) -> str:
    """Hash the parts of an answer."""
    return _hash("\0".join(texts).encode("utf-8", "surrogatepass"))


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:HEX_DIGITS]
