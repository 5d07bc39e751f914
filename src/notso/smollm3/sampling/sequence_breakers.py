"""Tokens of DRY's sequence breakers."""

from __future__ import annotations

import bisect
import threading
from collections import OrderedDict

from notso.smollm3.sampling.dry import Breakers
from notso.smollm3.text.tokenizer import Tokenizer, check_unicode

# Cached sets of breakers: a lookup takes some milliseconds.
KEPT = 64
MAX_TAIL_TOKENS = 20


class SequenceBreakers:
    """Breakers in one vocabulary. Thread-safe."""

    # As in llama.cpp (`get_overlapping_token_sequences`): a token that contains the text breaks, and so does one that
    # ends with its beginning, followed by the usual tokens of the rest.
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._found: OrderedDict[tuple[str, ...], Breakers] = OrderedDict()
        self._spelt: list[bytes] = []
        self._backwards: list[tuple[bytes, int]] = []

    def of(self, texts: tuple[str, ...]) -> Breakers:
        """Return the texts' tokens. Raises InvalidRequestError for invalid Unicode."""
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
