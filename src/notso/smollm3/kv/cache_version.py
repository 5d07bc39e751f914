"""Digest of everything that cached keys and values depend on besides tokens: model, format, rotation, arithmetic.

Instruction sets, threads and batch sizes are not included: results are bit-identical across them.
"""

from __future__ import annotations

import hashlib
import os

import numpy as np

from notso.qtensor import GGUFFile
from notso.smollm3.config import SmolLM3Config
from notso.smollm3.kv.formats import KVFormat

# Incremented when the order or precision of a float operation, or the layout of a cache block, changes.
ARITHMETIC = 2

SAMPLES = 4
SAMPLE_BYTES = 1024
DIGEST_BYTES = 32


def file_marks(status: os.stat_result) -> tuple[int, ...]:
    """Return what a file keeps exactly as long as it is not written to, replaced or copied."""
    # The modification time can be set to any value, the time of the last change of status cannot.
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def sampled_identity(file: GGUFFile) -> bytes:
    """Return 32 bytes that identify an unchanged model file by its `file_marks` and samples of each tensor."""
    # Hashing two gigabytes would delay the first answer; see model_identity.py for the digest of the whole content.
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    digest.update(repr(file_marks(file.status)).encode())
    for name, tensor in sorted(file.tensors.items()):
        digest.update(repr((name, tensor.format.name, tensor.shape)).encode())
        last = max(tensor.nbytes - SAMPLE_BYTES, 0)
        for start in np.linspace(0, last, SAMPLES, dtype=np.int64):
            digest.update(tensor.data[start : start + SAMPLE_BYTES].tobytes())
    return digest.digest()


def cache_version(identity: bytes, config: SmolLM3Config, kv_format: KVFormat, context_tokens: int) -> bytes:
    """Return 32 bytes that are equal exactly if caches of the file with this `identity` are interchangeable."""
    rotation = config.rope_frequencies(context_tokens)
    depends_on = repr((ARITHMETIC, config, kv_format, rotation)).encode()
    return hashlib.blake2b(depends_on + identity, digest_size=DIGEST_BYTES).digest()
