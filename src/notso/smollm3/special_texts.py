"""Where the special tokens of a vocabulary stand in a text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Run(NamedTuple):
    """A stretch of a prompt: one special token by its text, or ordinary text in which nothing is special."""

    text: str
    special: bool


class SpecialTexts:
    """The texts of a file's control and user-defined tokens; cuts other text at them.

    Cuts as the `tokenizers` library does with its added tokens: the leftmost match first, the longest of several
    that begin at the same place. Raises ValueError if one of the texts is empty.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = tuple(dict.fromkeys(texts))
        if "" in self._texts:
            raise ValueError("a special token has no text")
        longest_first = sorted(self._texts, key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def split(self, text: str) -> list[Run]:
        """Cut `text` into runs whose texts join to it again; ordinary runs are never empty."""
        if self._pattern is None:
            return [Run(text, False)] if text else []
        # With one group re.split returns ordinary and matched texts in turn.
        pieces = self._pattern.split(text)
        return [Run(piece, index % 2 == 1) for index, piece in enumerate(pieces) if piece]
