"""How far a JSON text has come, as far as strings and numbers are concerned."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from notso.smollm3.text.tokenizer import Tokenizer

MAX_DIGITS = 16
"""Of a number: what a double holds, and what keeps a model from writing digits for ever."""

_NUMBER = frozenset(b"0123456789.eE+-")
_DIGITS = frozenset(b"0123456789")
_NUMBER_GOES_ON = re.compile(rb"[0-9.eE+-]+")


class JsonState(NamedTuple):
    """Position in a JSON text. digits: of the number that it may go on with."""

    in_string: bool = False
    escaped: bool = False
    digits: int = 0

    def behind(self, text: bytes) -> JsonState:
        """The state behind `text`."""
        in_string, escaped, digits = self
        for byte in text:
            if escaped:
                escaped = False
            elif byte == 0x22:
                in_string, digits = not in_string, 0
            elif in_string:
                escaped = byte == 0x5C
            elif byte in _DIGITS:
                digits += 1
            elif byte not in _NUMBER:
                digits = 0
        return JsonState(in_string, escaped, digits)


def number_digits(tokenizer: Tokenizer) -> npt.NDArray[np.uint16]:
    """For each token: how many digits a number has at least that goes on with it (V,)."""
    found = np.zeros(tokenizer.vocab_size, np.uint16)
    for token in range(tokenizer.vocab_size):
        text = tokenizer.token_bytes(token)
        if text and text[0] in _NUMBER and (number := _NUMBER_GOES_ON.match(text)):
            digits = sum(byte in _DIGITS for byte in number[0])
            found[token] = digits + (number[0][-1] not in _DIGITS)
    return found
