"""Special tokens in text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Run(NamedTuple):
    """One special token, or ordinary text."""

    text: str
    special: bool


class SpecialTexts:
    """Splits text at special tokens. Raises ValueError for an empty one."""

    # As the `tokenizers` library splits at added tokens: leftmost, then longest match.
    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = dict.fromkeys(texts)
        if "" in self._texts:
            raise ValueError("a special token has no text")
        lengths: dict[str, set[int]] = {}
        for special in self._texts:
            lengths.setdefault(special[0], set()).add(len(special))
        # Not a single pattern: a file may have a million special tokens, and each would be tried at every position.
        self._lengths = {first: sorted(some, reverse=True) for first, some in lengths.items()}
        self._beginning = re.compile(f"[{''.join(map(re.escape, lengths))}]") if lengths else None

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def split(self, text: str) -> list[Run]:
        """Split into runs; ordinary ones are nonempty."""
        runs: list[Run] = []
        end = 0
        for found in self._beginning.finditer(text) if self._beginning else ():
            start = found.start()
            special = self._at(text, start) if start >= end else None
            if special is not None:
                runs += [Run(text[end:start], False)] * (start > end) + [Run(special, True)]
                end = start + len(special)
        return runs + [Run(text[end:], False)] * (end < len(text))

    def _at(self, text: str, start: int) -> str | None:
        for length in self._lengths[text[start]]:
            piece = text[start : start + length]
            if piece in self._texts:
                return piece
        return None
