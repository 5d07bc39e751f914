"""Cache of token ids of long texts, as conversations recur with every turn."""

from __future__ import annotations

import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence

# Shorter texts are fast to encode. For long ones timing does not let a text be guessed.
LEAST_CHARACTERS = 512

# Limit for texts and ids together: eight million characters of plain English, or a million of text without long tokens.
MOST_BYTES = 16 * 2**20


class EncodedTexts:
    """Recently used texts. Thread-safe."""

    def __init__(self) -> None:
        self._texts: OrderedDict[str, array[int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def encode(self, texts: Sequence[str], encode: Callable[[Sequence[str]], list[list[int]]]) -> list[Sequence[int]]:
        """Return ids; `encode` is called once for uncached texts."""
        with self._lock:
            known = {text: self._texts[text] for text in texts if len(text) >= LEAST_CHARACTERS and text in self._texts}
            for text in known:
                self._texts.move_to_end(text)
        new = [text for text in texts if text not in known]
        ids = dict(zip(new, encode(new), strict=True)) if new else {}
        self._keep(ids)
        return [known[text] if text in known else ids[text] for text in texts]

    def _keep(self, ids: dict[str, list[int]]) -> None:
        with self._lock:
            for text, its_ids in ids.items():
                size = _size(text, len(its_ids))
                if len(text) >= LEAST_CHARACTERS and size <= MOST_BYTES and text not in self._texts:
                    self._texts[text] = array("i", its_ids)
                    self._bytes += size
            while self._bytes > MOST_BYTES:
                text, kept = self._texts.popitem(last=False)
                self._bytes -= _size(text, len(kept))


def _size(text: str, ids: int) -> int:
    return sys.getsizeof(text) + 4 * ids
