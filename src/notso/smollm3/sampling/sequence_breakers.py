"""Which tokens make up a text that DRY sees no repetition across."""

from __future__ import annotations

import bisect
import threading
from collections import OrderedDict

from notso.smollm3.sampling.dry import Breakers
from notso.smollm3.text.tokenizer import Tokenizer, check_unicode

KEPT = 64
"""Sets of breakers whose tokens are remembered: looking all of them up takes some milliseconds each time."""
MAX_TAIL_TOKENS = 20


class SequenceBreakers:
    """Looks breakers up in one vocabulary. Safe to use from several threads.

    As llama.cpp does it (`get_overlapping_token_sequences`): any token that holds the text breaks, and so does one that
    ends with a beginning of it where the rest follows in the tokens that it is usually written with.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._found: OrderedDict[tuple[str, ...], Breakers] = OrderedDict()
        self._spelt: list[bytes] = []
        self._backwards: list[tuple[bytes, int]] = []

    def of(self, texts: tuple[str, ...]) -> Breakers:
        """The tokens of these. Raises InvalidRequestError for text that is not valid Unicode."""
        for text in texts:
            check_unicode(text, "dry_sequence_breakers")
        with self._lock:
            found = self._found.get(texts)
            if found is None:
                found = self._found[texts] = self._look_up(texts)
                if len(self._found) > KEPT:
                    self._found.popitem(last=False)
            self._found.move_to_end(texts)
            return found

    def _look_up(self, texts: tuple[str, ...]) -> Breakers:
        if not self._spelt:
            self._spelt = [self._tokenizer.token_bytes(token) for token in range(self._tokenizer.vocab_size)]
            self._backwards = sorted((spelt[::-1], token) for token, spelt in enumerate(self._spelt))
        single, sequences = set[int](), dict[int, set[tuple[int, ...]]]()
        for text in texts:
            whole = text.encode()
            single |= {token for token, spelt in enumerate(self._spelt) if whole in spelt}
            for cut in range(1, len(text)):
                tail = self._tokenizer.encode(text[cut:])[:MAX_TAIL_TOKENS]
                for head in self._ending_with(text[:cut].encode()):
                    sequences.setdefault(tail[-1], set()).add((head, *tail))
        return Breakers(frozenset(single), {last: tuple(sorted(each)) for last, each in sequences.items()})

    def _ending_with(self, end: bytes) -> list[int]:
        backwards = end[::-1]
        first = bisect.bisect_left(self._backwards, (backwards, -1))
        tokens = []
        for spelt, token in self._backwards[first:]:
            if not spelt.startswith(backwards):
                break
            tokens.append(token)
        return tokens
