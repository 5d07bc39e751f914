"""Check a model file against goldens: expected results computed by another implementation.

The goldens in this folder are for the released SmolLM3-3B; their values come from transformers' tests. Goldens for
other models use the same format: JSON with `name`, `source`, `shape` (layers, hidden_size, vocab_size) and `cases`. A
case has either `ids` or `text` (without control tokens), and any of:

    means: the mean logit at each position
    logits: list of runs; a run has the logits at `position` (`values`) of consecutive token ids, starting at `first`
    continuation: ids or text that greedy decoding should produce next; some tokens may differ
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from notso.qtensor import GGUFFile
from notso.smollm3.config import SmolLM3Config
from notso.smollm3.engine.engine import Engine
from notso.smollm3.errors import InvalidRequestError
from notso.smollm3.strict_json import DECODER
from notso.text_file import read_regular

RELEASED = Path(__file__).with_name("smollm3-3b.json")

MAX_BYTES = 64 << 20
CONTEXT = 1024  # maximum length of a case, in tokens

# Largest allowed error for a file with at least 16 bits per weight. The error is the root mean square difference,
# relative to the standard deviation of the logits. A half-precision KV cache alone causes an error of 0.001; rounding
# the weights to bfloat16 causes one of 0.01.
FLOAT_ERROR = 0.02

# Allowed error for quantized files: a constant for 8-bit activations, plus a term that halves with each additional bit
# per weight. With random weights, errors from 0.06 (Q8_0) to 0.46 (Q4_0) were measured, all below this limit
# (tests/smollm3/diagnostics/test_goldens.py). Trained weights cause smaller errors; an unrelated model causes an error
# of 1.4. The limit has not been tested with SmolLM3-3B.
ROUNDED_ERROR, ERROR_AT_NO_BITS = 0.05, 12.0

FLOAT_BITS = 16.0

Floats: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class GoldenCheck:
    """A relative error or a share of differing tokens, with its limit."""

    what: str
    found: float
    allowed: float

    @property
    def ok(self) -> bool:
        return self.found <= self.allowed  # False for NaN


@dataclass(frozen=True, slots=True)
class GoldenReport:
    """Results of all golden cases; the limits depend on `bits` per weight."""

    name: str
    source: str
    bits: float
    checks: tuple[GoldenCheck, ...]

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)


@dataclass(frozen=True, slots=True)
class _Case:
    ids: list[int]
    means: Floats
    runs: tuple[tuple[int, int, Floats], ...]  # position, first token, logits
    continuation: list[int]


def check_goldens(model: str | Path, goldens: Path = RELEASED) -> GoldenReport:
    """Compare a model with goldens. Raises InvalidRequestError for unsuitable goldens, and Engine.load's errors."""
    document = _read(goldens)
    with GGUFFile.open(model) as file:
        bits = bits_per_weight(file)
        config = SmolLM3Config.from_metadata(file.metadata)
        _require_shape(document, config)
        file.metadata.release()
    context = min(CONTEXT, config.max_position_embeddings)  # beyond the trained context, YaRN would change all
    with Engine.load(model, kv="f16", context_tokens=context, max_num_seqs=1) as engine:
        checks: list[GoldenCheck] = []
        for number, case in enumerate(_list(document, "cases"), 1):
            checks += _checks(f"case {number}", engine, _case(engine, case), bits)
    if not checks:
        raise InvalidRequestError(f"{goldens}: no case has means, logits or a continuation to compare")
    return GoldenReport(str(document.get("name", goldens.name)), str(document.get("source", "")), bits, tuple(checks))


def bits_per_weight(file: GGUFFile) -> float:
    """Return the average bits per weight over all matrices."""
    matrices = [tensor for tensor in file.tensors.values() if len(tensor.shape) == 2]
    return 8 * sum(tensor.nbytes for tensor in matrices) / sum(tensor.rows * tensor.cols for tensor in matrices)


def allowed_error(bits: float) -> float:
    """Return the largest allowed error relative to the logits' standard deviation."""
    return FLOAT_ERROR if bits >= FLOAT_BITS else min(ROUNDED_ERROR + ERROR_AT_NO_BITS * 2.0**-bits, 1.0)


def _checks(name: str, engine: Engine, case: _Case, bits: float) -> Iterator[GoldenCheck]:
    logits = engine.logits(case.ids + case.continuation[:-1])
    allowed = allowed_error(bits)
    if len(case.means):
        found = logits[: len(case.means)]
        error = _root_mean_square(found.mean(axis=1) - case.means) / _deviation(found)
        yield GoldenCheck(f"{name}: mean logits of {len(case.means)} positions", error, allowed)
    for position, first, values in case.runs:
        found = logits[position, first : first + len(values)]
        error = _root_mean_square(found - values) / _deviation(values)
        yield GoldenCheck(f"{name}: {len(values)} logits at position {position}", error, allowed)
    if case.continuation:
        greedy = logits[len(case.ids) - 1 :].argmax(axis=1)
        share = float((greedy != np.array(case.continuation)).mean())
        # Some tokens may differ, because rounding may change the most likely token if two logits are nearly equal. A
        # wrong model produces the same tokens only by chance.
        yield GoldenCheck(f"{name}: share of {len(greedy)} greedy tokens that differ", share, min(0.1 + allowed, 0.5))


def _deviation(values: Floats) -> float:
    # Errors are divided by the result, which must not be zero. If all values are equal, it is a tiny number, with which
    # any difference fails the check.
    return float(values.std()) or float(np.finfo(np.float32).tiny)


def _root_mean_square(difference: Floats) -> float:
    return float(np.sqrt(np.mean(np.square(difference, dtype=np.float64))))


def _read(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InvalidRequestError(f"{path}: goldens are limited to {MAX_BYTES >> 20} MiB")
        document = DECODER.decode(read_regular(path, MAX_BYTES).decode())
    except OSError as error:
        raise InvalidRequestError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise InvalidRequestError(f"{path}: not JSON") from None
    if not isinstance(document, dict):
        raise InvalidRequestError(f"{path}: goldens must be a JSON object")
    return document


def _require_shape(document: Mapping[str, Any], config: SmolLM3Config) -> None:
    shape = document.get("shape")
    if not isinstance(shape, dict):
        raise InvalidRequestError("goldens must specify the shape of their model")
    expected = {"layers": config.num_hidden_layers, "hidden_size": config.hidden_size, "vocab_size": config.vocab_size}
    for name, value in expected.items():
        if shape.get(name) != value:
            raise InvalidRequestError(
                f"these goldens belong to another model: {name} is {shape.get(name)}, not {value}"
            )


def _case(engine: Engine, case: Any) -> _Case:
    if not isinstance(case, dict) or ("ids" in case) == ("text" in case):
        raise InvalidRequestError("each case of the goldens must have either ids or text")
    vocab = engine.config.vocab_size
    ids = _ids(case["ids"], vocab) if "ids" in case else engine.tokenize(_text(case["text"]))
    following = case.get("continuation", [])
    if isinstance(following, str):  # tokenized together with the text, because a token may span the boundary
        both = engine.tokenize(_text(case.get("text", "")) + following)
        if both[: len(ids)] != ids:
            raise InvalidRequestError("a token of the goldens spans a text and its continuation")
        following = both[len(ids) :]
    else:
        following = _ids(following, vocab)
    means = _floats(case.get("means", []))
    runs = tuple(_run(each, len(ids), vocab) for each in _list(case, "logits"))
    if not ids or len(means) > len(ids) or len(ids) + len(following) > engine.info.context_tokens:
        raise InvalidRequestError("a case of the goldens has no ids, too many ids, or more means than ids")
    return _Case(ids, means, runs, following)


def _run(entry: Any, positions: int, vocab: int) -> tuple[int, int, Floats]:
    if not isinstance(entry, dict):
        raise InvalidRequestError("logits of the goldens must have a position, a first token and values")
    position, first, values = entry.get("position"), entry.get("first", 0), _floats(entry.get("values"))
    if type(position) is not int or type(first) is not int or len(values) < 2:
        raise InvalidRequestError("logits of the goldens must have a position, a first token and several values")
    if not 0 <= position < positions or not 0 <= first <= vocab - len(values):
        raise InvalidRequestError(f"there are no logits at position {position} from token {first}")
    return position, first, values


def _list(container: Mapping[str, Any], name: str) -> list[Any]:
    values = container.get(name, [])
    if not isinstance(values, list):
        raise InvalidRequestError(f"{name} of the goldens must be a list")
    return values


def _ids(value: Any, vocab: int) -> list[int]:
    if not isinstance(value, list) or not all(type(each) is int and 0 <= each < vocab for each in value):
        raise InvalidRequestError("ids of the goldens must be token ids of this vocabulary")
    return value


def _floats(value: Any) -> Floats:
    if not isinstance(value, list) or not all(type(each) in (int, float) for each in value):
        raise InvalidRequestError("means and values of the goldens must be lists of numbers")
    try:
        return np.array(value, np.float32)
    except OverflowError:
        raise InvalidRequestError("means and values of the goldens must be lists of numbers") from None


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidRequestError("text of the goldens must be a string")
    return value
