"""Sample the next token.

The steps are, in this order: repetition, presence and frequency penalties, DRY, logit_bias, temperature, top_k,
typical_p, top_p, min_p, XTC, and the random draw. As in Hugging Face's generation, for which SmolLM3's recommended
settings were chosen, temperature precedes the filters. typical_p and XTC have the same positions among the filters as
in llama.cpp. They have a separate code path (`apply_filters`), so that other requests are not slowed down.

The random numbers depend only on the seed and the position.

In a flat distribution, top_p has tens of thousands of candidates, and sorting all of them would dominate the cost. But
only two ranks matter: that of the drawn token and that of the last token of the nucleus (the tokens that top_p keeps).
The candidates are therefore divided into buckets of nearly equal weights. The sums of the buckets show which buckets
contain these ranks, and only those buckets are sorted.

DRY ("don't repeat yourself") penalizes tokens that would extend a repetition: the longer the repetition, the larger the
penalty. If at least the last `dry_allowed_length` tokens also occur earlier in the text, the token that followed them
there is penalized. Repetitions end at sequence breakers, and a token that contains a breaker is never penalized.
"""

from __future__ import annotations

import bisect
import math
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from notso.smollm3.errors import EngineError, InvalidRequestError, Sentence
from notso.smollm3.text.tokenizer import Tokenizer, check_unicode
from notso.smollm3.values.sampling_params import SamplingParams

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Indices = NDArray[np.intp]
Tokens = Sequence[int] | NDArray[np.integer]

NOT_FINITE = Sentence("the model's logits are not finite", "engine_not_finite")
MAX_PENALTY = 1e30  # finite, so that some token remains eligible


@dataclass(frozen=True, slots=True)
class BreakerTokens:
    """Tokens (`single`) and token sequences (`tails`) that contain a sequence breaker."""

    single: frozenset[int] = frozenset()
    # The nested keys describe a sequence without its first token: its last token, its length, and all its tokens. The
    # values are the sets of possible first tokens, because thousands of tokens can end with the same letter.
    tails: Mapping[int, Mapping[int, Mapping[tuple[int, ...], frozenset[int]]]] = field(default_factory=dict)


NO_BREAKERS = BreakerTokens()


class RepetitionFinder:
    """Finds earlier occurrences of the end of a growing history, for DRY."""

    # The rules are those of llama.cpp's `llama_sampler_dry_apply` (src/llama-sampling.cpp), which implements p-e-w's
    # proposal (github.com/oobabooga/text-generation-webui, pull request 5677).
    def __init__(self, params: SamplingParams, breakers: BreakerTokens) -> None:
        self._params = params
        self._breakers = breakers
        self._history: Tokens = ()
        self._clear()

    def penalties(self, history: Tokens) -> tuple[Indices, Floats]:
        """Return ascending token ids and the amounts to subtract from their logits."""
        # Match lengths are updated for each new token with one comparison per position, which is cheaper than a new
        # search. If the same list is passed again, tokens may only have been appended to it.
        if history is not self._history or len(history) < self._count:
            self._history = history
            self._clear()
        self._extend_history(history)
        return self._penalties()

    def _clear(self) -> None:
        self._count = 0
        self._since_break = 0
        self._tokens = np.empty(0, np.int64)
        self._lengths = np.empty(0, np.int64)  # [i]: length of the match that ends at i

    def _extend_history(self, history: Tokens) -> None:
        previous, self._count = self._count, len(history)
        if self._count > len(self._tokens):
            capacity = 2 * self._count
            self._tokens, self._lengths = (np.resize(array, capacity) for array in (self._tokens, self._lengths))
        self._tokens[previous : self._count] = history[previous:]
        if previous == 0:
            self._lengths[: self._count] = common_suffix_lengths(history)
            self._since_break = next(
                (offset for offset in range(self._count) if self._ends_with_breaker(history, self._count - offset)),
                self._count,
            )
            return
        for end in range(previous, self._count):
            token = self._tokens[end]
            self._since_break = 0 if self._ends_with_breaker(history, end + 1) else self._since_break + 1
            lengths = self._lengths
            # Each match is extended to the next position or ends there; the length at the last position is always 0.
            lengths[1 : end + 1] = np.where(self._tokens[1 : end + 1] == token, lengths[:end] + 1, 0)
            lengths[0] = int(self._tokens[0] == token)
            lengths[end] = 0

    def _ends_with_breaker(self, history: Tokens, end: int) -> bool:
        token = int(history[end - 1])
        if token in self._breakers.single:
            return True
        return any(
            end > length and int(history[end - length - 1]) in tails.get(tuple(history[end - length : end]), ())
            for length, tails in self._breakers.tails.get(token, {}).items()
        )

    def _penalties(self) -> tuple[Indices, Floats]:
        params, allowed = self._params, self._params.dry_allowed_length
        window = self._count if params.dry_penalty_last_n < 0 else min(params.dry_penalty_last_n, self._count)
        longest = min(self._since_break, window)
        if window <= allowed or longest < allowed:
            return np.empty(0, np.intp), np.empty(0, np.float32)
        start = self._count - window
        matches = np.minimum(self._lengths[start : self._count - 1], np.arange(1, window))
        ends = np.flatnonzero(matches >= allowed)
        tokens, groups = np.unique(self._tokens[start + 1 + ends], return_inverse=True)
        lengths = np.zeros(len(tokens), np.int64)
        np.maximum.at(lengths, groups, np.minimum(matches[ends], longest))
        penalized = np.array([int(token) not in self._breakers.single for token in tokens], bool)
        with np.errstate(over="ignore"):
            amounts = params.dry_multiplier * np.float64(params.dry_base) ** (lengths[penalized] - allowed)
        return tokens[penalized].astype(np.intp), np.minimum(amounts, MAX_PENALTY).astype(np.float32)


def common_suffix_lengths(history: Tokens) -> NDArray[np.int64]:
    """Return, for each `history[: i + 1]`, the length of the suffix that it shares with `history` (0 for the last)."""
    # The Z algorithm, applied to the reversed history, in linear time.
    tokens = list(history)[::-1]
    found = [0] * len(tokens)
    left = right = 0  # [left, right) repeats the beginning
    for at in range(1, len(tokens)):
        length = min(found[at - left], right - at) if at < right else 0
        while at + length < len(tokens) and tokens[length] == tokens[at + length]:
            length += 1
        found[at] = length
        if at + length > right:
            left, right = at, at + length
    return np.array(found[::-1], np.int64)


CACHED_SETS = 64  # maximum number of cached breaker sets; finding the tokens of a set takes milliseconds
MAX_TAIL_TOKENS = 20  # maximum length of a breaker's token sequence, without its first token


class SequenceBreakers:
    """Finds the tokens of sequence breakers in one vocabulary. Thread-safe."""

    # As in llama.cpp (`get_overlapping_token_sequences`), a breaker's text is found in two forms: within a single
    # token, or as a token that ends with the beginning of the text, followed by the usual tokens of the rest.
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._cache: OrderedDict[tuple[str, ...], BreakerTokens] = OrderedDict()
        self._reversed: list[tuple[bytes, int]] = []
        self._heads: dict[str, frozenset[int]] = {}  # tokens by last letter; all breakers share these large sets

    def of(self, texts: tuple[str, ...]) -> BreakerTokens:
        """Return the tokens of the breakers `texts`. Raises InvalidRequestError for invalid Unicode."""
        for text in texts:
            check_unicode(text, "dry_sequence_breakers")
        with self._lock:
            tokens = self._cache.get(texts)
            if tokens is None:
                tokens = self._cache[texts] = self._find_breaker_tokens(texts)
                if len(self._cache) > CACHED_SETS:
                    self._cache.popitem(last=False)
            self._cache.move_to_end(texts)
            return tokens

    def _find_breaker_tokens(self, texts: tuple[str, ...]) -> BreakerTokens:
        token_bytes = self._tokenizer.all_bytes
        if not self._reversed:
            self._reversed = sorted((text_bytes[::-1], token) for token, text_bytes in enumerate(token_bytes))
        single, found = set[int](), dict[int, dict[int, dict[tuple[int, ...], frozenset[int]]]]()
        for text in texts:
            encoded = text.encode()
            single |= {token for token, text_bytes in enumerate(token_bytes) if encoded in text_bytes}
            for cut in range(1, len(text)):
                tail = tuple(self._tokenizer.encode(text[cut:])[:MAX_TAIL_TOKENS])
                if heads := self._tokens_ending_with(text[:cut]):
                    tails = found.setdefault(tail[-1], {}).setdefault(len(tail), {})
                    tails[tail] = tails[tail] | heads if tail in tails else heads
        return BreakerTokens(frozenset(single), found)

    def _tokens_ending_with(self, end: str) -> frozenset[int]:
        if end in self._heads:
            return self._heads[end]
        reversed_end = end.encode()[::-1]
        first = bisect.bisect_left(self._reversed, (reversed_end, -1))
        tokens = []
        for reversed_text, token in self._reversed[first:]:
            if not reversed_text.startswith(reversed_end):
                break
            tokens.append(token)
        found = frozenset(tokens)
        if len(end) == 1 and found:
            self._heads[end] = found
        return found


_PIECE = 16_384  # chunk size; for larger temporary arrays, the allocator would map memory on each call
_BUCKET_BITS = 16  # number of low bits that are ignored; weights in the same bucket differ by less than 1%


def sample_among_many(weights: Floats, nucleus_sum: float | None, uniform: float) -> int:
    """Draw an index from the nucleus of weights (float32, >= 0), using `uniform` in [0, 1)."""
    # The result is the same as if all weights were sorted by `ranked` and cut off where their sum first reaches
    # `nucleus_sum` (None: not cut off). The bits of nonnegative floats have the same order as their values.
    bits = (weights.view(np.uint32) >> np.uint32(_BUCKET_BITS)).astype(np.uint16)
    buckets = bits.max() - bits
    ends = np.cumsum(_bucket_sums(buckets, weights))

    def ranked_bucket(bucket: int) -> tuple[Indices, Doubles]:
        members = np.flatnonzero(buckets == bucket)
        order = ranked(members, weights[members])
        before = ends[bucket - 1] if bucket else 0.0
        return order, before + np.cumsum(weights[order], dtype=np.float64)

    last = int(np.searchsorted(ends, ends[-1]))  # later buckets have weight 0
    if nucleus_sum is not None:
        last = min(int(np.searchsorted(ends, nucleus_sum)), last)
    order, sums = ranked_bucket(last)
    if nucleus_sum is not None:
        size = int(np.searchsorted(sums, nucleus_sum)) + 1
        order, sums = order[:size], sums[:size]
    sampled = uniform * float(sums[-1])
    bucket = int(np.searchsorted(ends, sampled, side="right"))
    if bucket < last:
        order, sums = ranked_bucket(bucket)
    return int(order[min(int(np.searchsorted(sums, sampled, side="right")), len(order) - 1)])


def _bucket_sums(buckets: NDArray[np.uint16], weights: Floats) -> Doubles:
    # The sums are exact, whatever the order of additions, because the weights in a bucket share an exponent.
    sums = np.zeros(int(buckets.max()) + 1)
    for start in range(0, len(weights), _PIECE):
        piece = slice(start, start + _PIECE)
        sums += np.bincount(buckets[piece], weights=weights[piece], minlength=len(sums))
    return sums


def ranked(ids: Indices, weights: Floats) -> Indices:
    """Sort `ids` by descending weight, then id."""
    # One integer sort is several times faster than a stable float sort: the bits of nonnegative floats are ordered like
    # their values, and the id in the low bits breaks ties.
    keys = (~weights.view(np.uint32)).astype(np.uint64) << np.uint64(32) | ids.astype(np.uint64)
    keys.sort()
    return (keys & np.uint64(0xFFFF_FFFF)).astype(np.intp)


# Below this temperature, sampling is greedy, because dividing by such a small number would overflow or leave only the
# likeliest token.
GREEDY_TEMPERATURE = 1e-5

# Floors, as fractions of the likeliest token's probability. The candidates are the tokens above the first floor that
# leaves enough tokens. A typical nucleus has a few dozen tokens, so sorting all 128,256 would be wasteful.
_CANDIDATE_FLOORS = (1e-2, 1e-4, 1e-7)
# Without top_k, if there are more candidates than this, they are divided into buckets instead of sorted. The sampled
# token is the same.
MANY = 8192

_LEAST_WEIGHT = float(np.finfo(np.float32).smallest_subnormal)

# Tokens below _SHORT_LIST_WEIGHT are usually only counted, because the end of the nucleus rarely depends on their
# exact weights. Most of them are also below _FAINT_WEIGHT, which gives a tighter bound on the sum of their weights.
_SHORT_LIST_WEIGHT, _FAINT_WEIGHT = 5e-8, 1e-9
# If at most this many tokens are above _SHORT_LIST_WEIGHT, only their weights are computed, which costs far less.
_SHORT_LIST = 2048
_SLACK, _ROUNDING = 1.01, 1e-9  # generous bounds on the rounding errors of weights and of their sums
_UNSURE = -1
_MAXIMA_OF = 256  # chunk size of `likeliest`

_WORD = 0xFFFF_FFFF_FFFF_FFFF


class Sampler:
    """Deterministic sampler of one sequence with a 64-bit seed.

    Raises InvalidRequestError for logit_bias ids outside the vocabulary; without `vocab_size`, `sample` raises it.
    """

    def __init__(
        self, params: SamplingParams, seed: int, vocab_size: int | None = None, breakers: BreakerTokens = NO_BREAKERS
    ) -> None:
        self.params = params
        self.seed = seed & _WORD
        self.greedy = params.temperature < GREEDY_TEMPERATURE
        biases = sorted(params.logit_bias.items())  # sorted by id, so that ties go to the lowest
        self._bias_ids = np.array([token for token, _ in biases], np.intp)
        self._biases = np.array([bias for _, bias in biases], np.float32)
        self._filters = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
        self._weakens_seen = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0)
        self._repetitions = RepetitionFinder(params, breakers) if params.uses_dry else None
        self._has_penalties = self._weakens_seen or self._repetitions is not None
        self._has_rare_filters = params.typical_p < 1.0 or params.xtc_probability > 0.0
        if vocab_size is not None:
            self._check_bias(vocab_size)

    def sample(self, logits: Floats, history: Sequence[int] | NDArray[np.integer], position: int) -> int:
        """Return the token for `position` from float32 logits (V,). Ties go to the lowest id; -inf masks a token.

        Raises EngineError for other non-finite logits, or if no token remains.
        """
        if self.greedy and not self._has_penalties:
            return self._best_biased(logits)
        logits = self._apply_penalties(logits, history)
        best = _finite_argmax(logits)
        if self.greedy:
            return best
        if self._has_rare_filters:
            draw_word, xtc_word, _, _ = self._random_words(position)
            ids, weights = apply_filters(self._weights(logits, logits[best]), self.params, _to_unit_interval(xtc_word))
            return int(ids[_index_at(np.cumsum(weights, dtype=np.float64), _to_unit_interval(draw_word))])
        sampled = self._sample_short_list(logits, logits[best], position) if self._filters else _UNSURE
        return sampled if sampled != _UNSURE else self._sample_index(self._weights(logits, logits[best]), position)

    def _sample_short_list(self, logits: Floats, best: np.float32, position: int) -> int:
        # Computes only the weights above a limit. The bound on the other weights gives a lower and an upper bound on
        # the total. Usually the nucleus ends at the same token for both. If not, the result is _UNSURE.
        lowest, bound = self._weight_limit(best, _SHORT_LIST_WEIGHT)
        listed = logits >= lowest
        count = int(np.count_nonzero(listed))
        if count > _SHORT_LIST:
            return _UNSURE
        ids = np.flatnonzero(listed)
        faintest, faint = self._weight_limit(best, _FAINT_WEIGHT)
        above = int(np.count_nonzero(logits >= faintest))
        rest = (above - count) * bound + (len(logits) - above) * faint
        index = self._sample_index(self._weights(logits[ids], best), position, bound, rest)
        return index if index == _UNSURE else int(ids[index])

    def _weight_limit(self, best: np.float32, weight: float) -> tuple[np.float32, float]:
        # Returns the logit at which the weight is `weight`, and an upper bound on the weights of smaller logits. The
        # bound allows for rounding to single precision.
        limit = best + np.float32(self.params.temperature * math.log(weight))
        return limit, _SLACK * math.exp((float(limit) - float(best)) / self.params.temperature)

    def _sample_index(self, weights: Floats, position: int, bound: float = 0.0, rest: float = 0.0) -> int:
        # Weights that are missing from `weights` are below `bound`, and their sum is at most `rest`. Returns _UNSURE if
        # the result may depend on them.
        uniform = self._uniform(position)
        if not self._filters:
            return _index_at(np.cumsum(weights, dtype=np.float64), uniform)
        total = float(weights.sum(dtype=np.float64))
        least = most = self.params.top_p * total
        if rest:
            least, most = least * (1 - _ROUNDING), self.params.top_p * (total + rest) * (1 + _ROUNDING)
        ids = self._candidates(weights, most, bound)
        if ids is None:
            return _UNSURE if bound else self._sample_among_many(weights, least, uniform)
        ids, sums = self._filter_candidates(ids, weights, least, most)
        return int(ids[_index_at(sums, uniform)]) if len(ids) else _UNSURE

    def _sample_among_many(self, weights: Floats, nucleus_sum: float, uniform: float) -> int:
        end = nucleus_sum if self.params.top_p < 1.0 else None
        if self.params.min_p <= 0.0:
            return sample_among_many(weights, end, uniform)
        ids = np.flatnonzero(weights >= np.float32(self.params.min_p))
        return int(ids[sample_among_many(weights[ids], end, uniform)])

    def _best_biased(self, logits: Floats) -> int:
        # Avoids copying the logits unless the best token has a bias.
        best = _finite_argmax(logits)
        if not len(self._bias_ids):
            return best
        self._check_bias(len(logits))
        biased = logits[self._bias_ids] + self._biases
        first = int(np.argmax(biased))
        rival, value = int(self._bias_ids[first]), biased[first]
        if value > logits[best]:
            return rival
        if best in self.params.logit_bias:  # its bias may make it worse than a token without a bias
            return _finite_argmax(self._apply_penalties(logits, ()))
        return min(best, rival) if value == logits[best] else best

    def _apply_penalties(self, logits: Floats, history: Sequence[int] | NDArray[np.integer]) -> Floats:
        params = self.params
        if not self._has_penalties and not len(self._bias_ids):
            return logits
        logits = logits.copy()
        if self._weakens_seen:
            window = history[-params.penalty_window :] if params.penalty_window else history
            seen, counts = np.unique(np.asarray(window, dtype=np.intp), return_counts=True)
            values = logits[seen]
            values = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
            logits[seen] = values - (params.presence_penalty + params.frequency_penalty * counts)
        if self._repetitions is not None:
            repeated, penalties = self._repetitions.penalties(history)
            logits[repeated] -= penalties
        if len(self._bias_ids):
            self._check_bias(len(logits))
            logits[self._bias_ids] += self._biases
        return logits

    def _check_bias(self, vocab_size: int) -> None:
        if len(self._bias_ids) and self._bias_ids.max() >= vocab_size:
            raise InvalidRequestError(f"logit_bias: token ids must be below {vocab_size}", param="logit_bias")

    def _weights(self, logits: Floats, best: np.float32) -> Floats:
        with np.errstate(over="ignore"):  # a difference that overflows is -inf, with weight 0
            scaled: Floats = (logits - best) / np.float32(self.params.temperature)
        np.exp(scaled, out=scaled)
        return scaled

    def _candidates(self, weights: Floats, nucleus_sum: float, bound: float) -> Indices | None:
        # Returns ascending ids that include all tokens that pass the filters. Returns None if there are too many, or if
        # tokens that are missing from `weights` (below `bound`) might also pass.
        top_k, top_p, min_p = self.params.top_k, self.params.top_p, self.params.min_p
        # Tokens below min_p are not candidates, unless top_p needs the total weight of all tokens that pass top_k.
        lowest = max(min_p, _LEAST_WEIGHT) if not top_k or top_p >= 1.0 else _LEAST_WEIGHT
        for floor in [*(floor for floor in _CANDIDATE_FLOORS if floor > lowest), lowest]:
            if floor <= bound:
                return None
            listed = weights >= np.float32(floor)
            if not top_k and np.count_nonzero(listed) > MANY:
                return None
            ids = np.flatnonzero(listed)
            if len(ids) >= top_k if top_k else weights[ids].sum(dtype=np.float64) >= nucleus_sum:
                break
        if top_k and len(ids) > top_k:
            listed_weights = weights[ids]
            ids = ids[listed_weights >= np.partition(listed_weights, -top_k)[-top_k]]
        return ids

    def _filter_candidates(self, ids: Indices, weights: Floats, least: float, most: float) -> tuple[Indices, Doubles]:
        # Returns sorted ids and cumulative weights. The nucleus ends where the sum reaches a value between `least` and
        # `most`; if this does not determine the last token, the result is empty.
        params = self.params
        ids = ranked(ids, weights[ids])
        if params.top_k:
            ids = ids[: params.top_k]
        sorted_weights = weights[ids]
        sums = np.cumsum(sorted_weights, dtype=np.float64)
        end = len(ids)
        if params.top_p < 1.0:
            if params.top_k:
                least = most = params.top_p * float(sums[-1])
            end = int(np.searchsorted(sums, least)) + 1
            if most > least and end != int(np.searchsorted(sums, most)) + 1:
                end = 0
        if params.min_p > 0.0:
            end = min(end, int(np.count_nonzero(sorted_weights >= np.float32(params.min_p))))
        return ids[:end], sums[:end]

    def _uniform(self, position: int) -> float:
        return _to_unit_interval(self._random_words(position)[0])

    def _random_words(self, position: int) -> tuple[int, int, int, int]:
        # Philox4x64-10 with key `seed` and counter `position + 1` (Salmon et al., "Parallel random numbers: as easy as
        # 1, 2, 3", 2011). Each random decision uses its own word.
        a, b, c, d, key, other_key = position + 1, 0, 0, 0, self.seed, 0
        for _ in range(10):
            first, second = 0xD2E7470EE14C6C93 * a, 0xCA5A826395121157 * c
            a, b, c, d = second >> 64 ^ b ^ key, second & _WORD, first >> 64 ^ d ^ other_key, first & _WORD
            key, other_key = key + 0x9E3779B97F4A7C15 & _WORD, other_key + 0xBB67AE8584CAA73B & _WORD
        return a, b, c, d


def _to_unit_interval(word: int) -> float:
    return float(word >> 11) * 2.0**-53


def _finite_argmax(logits: Floats) -> int:
    best = int(logits.argmax())  # the first NaN, if any
    if not math.isfinite(logits[best]):
        raise EngineError(NOT_FINITE)
    return best


def _index_at(sums: Doubles, uniform: float) -> int:
    # `sums` are cumulative weights, and `uniform` is in [0, 1).
    index = int(np.searchsorted(sums, uniform * sums[-1], side="right"))
    # If the product rounds up to the last sum, the last token with a nonzero weight is chosen.
    return index if index < len(sums) else int(np.searchsorted(sums, sums[-1]))


def log_probabilities(logits: Floats) -> Floats:
    """Return the log-softmax of logits, float32 (..., V). Raises EngineError for NaN, inf, or only -inf."""
    best = logits.max(axis=-1, keepdims=True)
    if not np.isfinite(best).all():
        raise EngineError(NOT_FINITE)
    shifted = logits - best
    total = np.exp(shifted).sum(axis=-1, keepdims=True, dtype=np.float64)
    result: Floats = shifted - np.log(total).astype(np.float32)
    return result


def likeliest(values: Floats, count: int) -> list[int]:
    """Return the ids of the `count` largest values (V,), in descending order; ties go to the lowest id."""
    count = min(count, len(values))
    if count <= 0:
        return []
    # The maxima of at least `count` chunks reach the floor, so at least `count` values do, and rarely many more.
    maxima = np.maximum.reduceat(values, np.arange(0, len(values), _MAXIMA_OF))
    floor = np.partition(maxima, -count)[-count] if count <= len(maxima) else -np.inf
    ids = np.flatnonzero(values >= floor)
    return [int(token) for token in ids[np.lexsort((ids, -values[ids]))][:count]]


# Deviations from the expected surprise (negative log probability), in nats. For typical_p, they limit how many tokens
# are sorted, as _CANDIDATE_FLOORS does for top_k and top_p.
_DEVIATIONS = (0.5, 1.0, 2.0, 4.0, 8.0)


def apply_filters(weights: Floats, params: SamplingParams, chance: float) -> tuple[Indices, Floats]:
    """Apply all filters to weights (V,); return the remaining tokens, likeliest first, and their weights."""
    # XTC is applied if `chance`, in [0, 1), is below `xtc_probability`. At least one token always remains.
    ids = np.flatnonzero(weights)
    if 0 < params.top_k < len(ids):
        remaining = weights[ids]
        listed = ids[remaining >= np.partition(remaining, -params.top_k)[-params.top_k]]
        ids = np.sort(ranked(listed, weights[listed])[: params.top_k])
    if params.typical_p < 1.0:
        ids = _typical(ids, weights[ids], params.typical_p)
    if params.top_p < 1.0:
        ids = _nucleus(ids, weights[ids], params.top_p)
    if params.min_p > 0.0:
        remaining = weights[ids]
        ids = ids[remaining >= np.float32(params.min_p) * remaining.max()]
    ids = ranked(ids, weights[ids])
    remaining = weights[ids]
    if chance < params.xtc_probability:
        first = last_of_top_choices(remaining, params.xtc_threshold)
        return ids[first:], remaining[first:]
    return ids, remaining


def last_of_top_choices(weights: Floats, threshold: float) -> int:
    """Return the last index at which the weight is at least `threshold` of the total, or 0. `weights` must descend."""
    total = float(weights.sum(dtype=np.float64))
    return max(0, int(np.count_nonzero(weights >= threshold * total)) - 1)


def _typical(ids: Indices, weights: Floats, share: float) -> Indices:
    # Keeps the tokens whose surprise (negative log probability) is closest to the expected surprise, until their
    # probabilities add up to `share`. The result is sorted by id.
    total = float(weights.sum(dtype=np.float64))
    surprises = np.log(total) - np.log(weights, dtype=np.float64)
    expected = float(np.dot(weights, surprises)) / total
    deviations = np.abs(surprises - expected)
    for most in (*_DEVIATIONS, np.inf):
        near = np.flatnonzero(deviations <= most)
        if weights[near].sum(dtype=np.float64) >= share * total:
            break
    near = near[np.argsort(deviations[near], kind="stable")]
    sums = np.cumsum(weights[near], dtype=np.float64)
    return np.sort(ids[near[: int(np.searchsorted(sums, share * total)) + 1]])


def _nucleus(ids: Indices, weights: Floats, share: float) -> Indices:
    least, greatest = share * float(weights.sum(dtype=np.float64)), weights.max()
    for floor in (*_CANDIDATE_FLOORS, 0.0):
        listed = weights >= np.float32(floor) * greatest
        if weights[listed].sum(dtype=np.float64) >= least:
            break
    ids, weights = ids[listed], weights[listed]
    order = ranked(np.arange(len(ids)), weights)
    sums = np.cumsum(weights[order], dtype=np.float64)
    return ids[order[: int(np.searchsorted(sums, least)) + 1]]
