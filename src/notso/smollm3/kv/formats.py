"""KV formats; those under 8 bits are read through a Hadamard rotation and a codebook.

Beside a low-bit format, the first tile of a sequence (attention sinks) and the tiles being written are kept in k8v8.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path

from notso.qtensor import KV_FORMATS as KV_FORMATS
from notso.qtensor import GGUFFile, QTensor
from notso.qtensor import KVFormat as KVFormat
from notso.text_file import read_regular

WINDOW_FORMAT: KVFormat = "k8v8"


FILE = "formats.json"
MAX_BYTES = 1 << 16
MAX_KEPT = 64
FINE_FORMATS = ("F32", "F16", "BF16", "Q8_0")

_log = logging.getLogger(__name__)


def has_fine_weights(tensors: Iterable[QTensor]) -> bool:
    """Return whether most weights are floats or 8-bit."""
    # An 8-bit cache then costs more accuracy than the weights' own format (docs/kernels/attention.md).
    values = [(tensor.format.name in FINE_FORMATS, tensor.rows * tensor.cols) for tensor in tensors if tensor.rows > 1]
    return 2 * sum(count for is_fine, count in values if is_fine) > sum(count for _, count in values)


def kept_format(folder: Path, file: GGUFFile, context_tokens: int | None) -> KVFormat | None:
    """Return the stored format, or None."""
    found = _read(folder).get(_key(file, context_tokens))
    return next((each for each in KV_FORMATS if each == found), None)


def keep_format(folder: Path, file: GGUFFile, context_tokens: int | None, kv_format: KVFormat) -> None:
    """Store a choice, dropping the oldest."""
    kept, key = _read(folder), _key(file, context_tokens)
    if kept.get(key) == kv_format:
        return
    kept.pop(key, None)
    newest = dict([*kept.items(), (key, kv_format)][-MAX_KEPT:])
    draft = folder / f".{FILE}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft.write_text(json.dumps(newest, indent=1), "utf-8")
        draft.replace(folder / FILE)
    except OSError as error:
        # Not fatal: the rule yields the same choice again.
        _log.warning("the selected cache format cannot be stored in %s: %s", folder, error.strerror)
        draft.unlink(missing_ok=True)


def _read(folder: Path) -> dict[str, str]:
    try:
        content = json.loads(read_regular(folder / FILE, MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return {key: value for key, value in content.items() if isinstance(value, str)} if isinstance(content, dict) else {}


def _key(file: GGUFFile, context_tokens: int | None) -> str:
    return f"{file.path.name} {file.size_bytes} {context_tokens or 'any'}"
