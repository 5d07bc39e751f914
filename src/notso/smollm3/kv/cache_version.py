"""What cached keys and values depend on besides the tokens, as a digest: model, format, rotation, arithmetic.

Instruction sets, threads and batches are no part of it: they change no bit (design: one arithmetic, one answer).
"""

from __future__ import annotations

import hashlib

import numpy as np

from notso.qtensor import GGUFFile
from notso.smollm3.config import SmolLM3Config
from notso.smollm3.kv.formats import KVFormat

ARITHMETIC = 2
"""Counted up whenever the order or precision of any float step changes, or the layout of a block of the cache."""

SAMPLES = 4
SAMPLE_BYTES = 1024
DIGEST_BYTES = 32


def cache_version(file: GGUFFile, config: SmolLM3Config, kv_format: KVFormat, context_tokens: int) -> bytes:
    """32 bytes that are the same exactly where cached keys and values may be used again.

    Of the weights, samples of every tensor are read, and the file's length and time of change stand for the rest: to
    hash two gigabytes would take longer than the first answer may.
    """
    status = file.path.stat()
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    rotation = config.rope_frequencies(context_tokens)
    digest.update(repr((ARITHMETIC, config, kv_format, rotation, status.st_size, status.st_mtime_ns)).encode())
    for name, tensor in sorted(file.tensors.items()):
        digest.update(repr((name, tensor.format.name, tensor.shape)).encode())
        last = max(tensor.nbytes - SAMPLE_BYTES, 0)
        for start in np.linspace(0, last, SAMPLES, dtype=np.int64):
            digest.update(tensor.data[start : start + SAMPLE_BYTES].tobytes())
    return digest.digest()
