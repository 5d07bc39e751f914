"""Log probabilities of tokens, as the OpenAI API writes them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from notso.smollm3 import TokenLogprob

IMPOSSIBLE = -9999.0
"""In place of minus infinity, for which JSON has no number."""


def entries(tokens: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    """For chats: each token with its bytes and the likeliest at its place."""
    return [entry_of(token) | {"top_logprobs": [entry_of(other) for other in token.top]} for token in tokens]


def legacy(tokens: Iterable[TokenLogprob], offset: int) -> dict[str, Any]:
    """For plain completions: four lists. `offset` is where the text of the first token begins, in characters; a token
    that begins within a character begins where that does. A prompt's first token has null for its probabilities."""
    listed: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token in tokens:
        is_first = math.isnan(token.logprob)
        top = {_spelt(other): _finite(other.logprob) for other in token.top}
        listed["tokens"].append(_spelt(token))
        listed["token_logprobs"].append(None if is_first else _finite(token.logprob))
        listed["top_logprobs"].append(None if is_first else top)
        listed["text_offset"].append(offset - (not _begins(token.bytes[:1])))
        offset += _begins(token.bytes)
    return listed


def characters(tokens: Iterable[TokenLogprob]) -> int:
    """How many characters begin in them."""
    return sum(_begins(token.bytes) for token in tokens)


def _begins(spelt: Sequence[int]) -> int:
    """How many characters begin in these bytes of UTF-8."""
    return sum(byte & 0xC0 != 0x80 for byte in spelt)


def _spelt(token: TokenLogprob) -> str:
    """Its text; of bytes that are none by themselves the form that OpenAI gives them, for several would look alike."""
    if "\N{REPLACEMENT CHARACTER}" not in token.text or bytes(token.bytes) == token.text.encode():
        return token.text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.bytes)


def entry_of(token: TokenLogprob) -> dict[str, Any]:
    """A token without what might have stood in its place."""
    return {"token": token.text, "logprob": _finite(token.logprob), "bytes": list(token.bytes)}


def _finite(logprob: float) -> float:
    return max(logprob, IMPOSSIBLE)
