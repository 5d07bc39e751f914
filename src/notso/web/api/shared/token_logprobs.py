"""Log probabilities of tokens, as the OpenAI API writes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from notso.smollm3 import TokenLogprob

IMPOSSIBLE = -9999.0
"""In place of minus infinity, for which JSON has no number."""


def entries(tokens: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    """For chats: each token with its bytes and the likeliest at its place."""
    return [_entry(token) | {"top_logprobs": [_entry(other) for other in token.top]} for token in tokens]


def legacy(tokens: Iterable[TokenLogprob], offset: int) -> dict[str, Any]:
    """For plain completions: four lists. `offset` is where the text of the first token begins, in characters."""
    listed: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token in tokens:
        listed["tokens"].append(token.text)
        listed["token_logprobs"].append(_finite(token.logprob))
        listed["top_logprobs"].append({other.text: _finite(other.logprob) for other in token.top})
        listed["text_offset"].append(offset)
        offset += len(token.text)
    return listed


def _entry(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": _finite(token.logprob), "bytes": list(token.bytes)}


def _finite(logprob: float) -> float:
    return max(logprob, IMPOSSIBLE)
