"""Where the special tokens of a vocabulary stand in a text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Run(NamedTuple):
    """A span of a prompt: one special token by its text, or ordinary text in which nothing is special."""

    text: str
    special: bool


class SpecialTexts:
    """The texts of a file's control and user-defined tokens; cuts other text at them.

    Cuts as the `tokenizers` library does with its added tokens: the leftmost match first, the longest of several
    that begin at the same place. Raises ValueError if one of the texts is empty.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = dict.fromkeys(texts)
        if "" in self._texts:
            raise ValueError("a special token has no text")
        lengths: dict[str, set[int]] = {}
        for special in self._texts:
            lengths.setdefault(special[0], set()).add(len(special))
        # Not one pattern of all texts: a file may name a million of them, and each would be tried at each place.
        self._lengths = {first: sorted(some, reverse=True) for first, some in lengths.items()}
        self._beginning = re.compile(f"[{''.join(map(re.escape, lengths))}]") if lengths else None

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def split(self, text: str) -> list[Run]:
        """Cut `text` into runs whose texts join to it again; ordinary runs are never empty."""
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
        """The longest special text that begins there."""
        for length in self._lengths[text[start]]:
            piece = text[start : start + length]
            if piece in self._texts:
                return piece
        return None
