"""Verify a model file's integrity and this machine's kernels.

Checks:

- The file's SHA-256 is compared with those of the published files.
- The file must have all tensors of the model, with the correct shapes.
- The tokenizer and the chat template are constructed as for an engine.
- The scales of every tensor must be finite. For sampled rows w of every matrix and random inputs x, the native kernels'
  products x w are compared with float64 products of the dequantized weights. For quantized formats, the kernels'
  products must also be bit-identical to the numpy reference's. Errors are relative to |x| |w|, the largest possible
  product, so that errors of products near zero do not appear large.

The fingerprint is a short hash of what a model computes. It is the same on every machine, kernel family and device, so
a different fingerprint means a different file, cache format, RoPE scaling or release, or a fault.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from notso.qtensor import CPU, GGUFFile, QTensor, matmul_q8k, scales_of
from notso.smollm3.config import SmolLM3Config
from notso.smollm3.engine.engine import Engine
from notso.smollm3.errors import ModelFileError, TemplateError
from notso.smollm3.hub import registry
from notso.smollm3.model.weights import SmolLM3Weights
from notso.smollm3.text.chat_template import ChatTemplate
from notso.smollm3.text.prompt import PromptWriter
from notso.smollm3.text.tokenizer import Tokenizer
from notso.smollm3.values.sampling_params import SamplingParams

PROMPT_TOKENS, ANSWER_TOKENS = 48, 16

HEX_DIGITS = 16


def model_fingerprint(engine: Engine) -> str:
    """Hash a fixed prompt's logits and the greedy answer to it."""
    vocab = engine.config.vocab_size
    ids = [(17 + 7919 * at) % vocab for at in range(PROMPT_TOKENS)]
    greedy = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    answer = "".join(event.text for event in engine.generate(ids, greedy))
    return _hash(engine.logits(ids).astype("<f4", copy=False).tobytes() + answer.encode())


def answer_fingerprint(*texts: str) -> str:
    """Hash the parts of an answer."""
    return _hash("\0".join(texts).encode("utf-8", "surrogatepass"))


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:HEX_DIGITS]


SAMPLED_ROWS = 128  # rows checked per matrix, evenly spaced, including the first and the last
INPUTS = 2
SCALE_CHUNK_BYTES = 16 << 20

# Activations are rounded to 8 bits, with an error of up to max|x| / 254 in each of a block's 256 values. With normally
# distributed inputs, the relative error is 0.0020 for rows of 256 values and 0.0007 for rows of 2,048 values. Faults
# such as swapped nibbles or scales cause errors of 0.02 or more.
QUANTIZED_TOLERANCE = 0.003
# The measured error of float32 sums is 3e-8.
FLOAT_TOLERANCE = 1e-6

Floats: TypeAlias = npt.NDArray[np.float32]
Progress: TypeAlias = Callable[[str, int, int], None]  # activity, bytes done, total bytes


@dataclass(frozen=True, slots=True)
class TensorCheck:
    """Result for one tensor; `problem` is None if it passed."""

    name: str
    format: str
    shape: tuple[int, ...]
    rows_checked: int
    # Error of the worst sampled row, relative to |x| |w|; None if no product was computed (norms, invalid scales, and
    # quantized rows of an unsupported length).
    worst_error: float | None
    tolerance: float | None
    problem: str | None


@dataclass(frozen=True, slots=True)
class Verification:
    """Results of a file's checks."""

    path: str
    size_bytes: int
    sha256: str | None
    known_as: str | None  # the published file with the same contents, or None
    structure_problem: str | None
    prompt_problem: str | None  # problem with the tokenizer or chat template
    tensors: tuple[TensorCheck, ...]

    @property
    def worst(self) -> TensorCheck | None:
        measured = [check for check in self.tensors if check.worst_error is not None]
        return max(measured, key=lambda check: check.worst_error or 0.0, default=None)

    @property
    def problems(self) -> tuple[str, ...]:
        found = (self.structure_problem, self.prompt_problem)
        return (*filter(None, found), *(f"{check.name}: {check.problem}" for check in self.tensors if check.problem))

    @property
    def ok(self) -> bool:
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        plain = asdict(self)
        plain |= {"ok": self.ok, "problems": list(self.problems)}
        plain["worst"] = asdict(self.worst) if self.worst else None
        return plain


def verify_file(path: str | Path, *, hash_file: bool = True, progress: Progress | None = None) -> Verification:
    """Run all checks and store the file's hash for `notso list`. Raises GGUFError or OSError.

    progress: called with "hashing", then with "checking", each with the bytes done and in total.
    """
    path = Path(path)
    report = progress or (lambda what, done, total: None)
    with GGUFFile.open(path) as file:
        digest = None
        if hash_file:
            digest = registry.sha256_of(path, lambda _what, done, total: report("hashing", done, total))
            registry.store_hash(path, digest)
        known = registry.find_by_hash(digest) if digest else None
        structure, prompts = _structure_problem(file), _prompt_problem(file)
        total = sum(tensor.nbytes for tensor in file.tensors.values())
        done, checks = 0, []
        for check in verify_tensors(file):
            checks.append(check)
            done += file.tensors[check.name].nbytes
            report("checking", done, total)
        return Verification(
            path=str(path),
            size_bytes=file.size_bytes,
            sha256=digest,
            known_as=known.name if known else None,
            structure_problem=structure,
            prompt_problem=prompts,
            tensors=tuple(checks),
        )


def verify_tensors(file: GGUFFile, *, seed: int = 0) -> Iterator[TensorCheck]:
    """Check all tensors in file order. Inputs depend on `seed` and the tensor's width."""
    for tensor in file.tensors.values():
        yield check_tensor(tensor, seed=seed)


def check_tensor(tensor: QTensor, *, seed: int = 0) -> TensorCheck:
    """Check a tensor's scales and the products of sampled rows."""
    tolerance = FLOAT_TOLERANCE if tensor.format.is_float else QUANTIZED_TOLERANCE

    def result(rows: int, error: float | None, problem: str | None) -> TensorCheck:
        bound = tolerance if error is not None else None
        return TensorCheck(tensor.name, tensor.format.name, tensor.shape, rows, error, bound, problem)

    bad = _first_bad_row(tensor)
    if bad is not None:
        return result(0, None, f"row {bad} has a value that is NaN or infinite")
    if len(tensor.shape) == 1:
        return result(0, None, None)  # norms are not matrices
    if not tensor.format.is_float and tensor.cols % 256:
        return result(
            0, None, f"rows of {tensor.cols} values cannot be multiplied; the row length must be a multiple of 256"
        )
    sample = _sampled_rows(tensor)
    x = np.random.default_rng([seed, tensor.cols]).standard_normal((INPUTS, tensor.cols), np.float32)
    backend = CPU()
    out = backend.empty(INPUTS, sample.rows)
    backend.matmul(backend.upload(x), backend.weight(sample), out)
    product = backend.download(out)
    error = _worst_error(product, x, sample)
    if not error <= tolerance:
        return result(sample.rows, error, f"relative error of {error:.2g}; at most {tolerance:.2g} is allowed")
    if not tensor.format.is_float and not np.array_equal(product, matmul_q8k(x, sample)):
        return result(sample.rows, error, "the product differs from the reference in its last bits")
    return result(sample.rows, error, None)


def _first_bad_row(tensor: QTensor) -> int | None:
    # Reads all scales (in float formats, all values).
    step = max(1, SCALE_CHUNK_BYTES // tensor.row_bytes)
    for start in range(0, tensor.rows, step):
        scales = scales_of(tensor.format, tensor.row_data(start, min(start + step, tensor.rows)))
        finite = np.isfinite(scales)
        if not finite.all():
            per_row = tensor.cols // tensor.format.block_values
            return start + int(np.argmin(finite.all(axis=1))) // per_row
    return None


def _sampled_rows(tensor: QTensor) -> QTensor:
    rows = np.unique(np.linspace(0, tensor.rows - 1, min(SAMPLED_ROWS, tensor.rows)).astype(np.int64))
    packed = np.ascontiguousarray(tensor.row_data()[rows])
    return replace(tensor, shape=(len(rows), tensor.cols), data=packed.reshape(-1))


def _worst_error(product: Floats, x: Floats, weight: QTensor) -> float:
    # Returns the largest |product - exact product| / (|x| |w|).
    weights = weight.dequantize().astype(np.float64)
    expected = np.einsum("ik,jk->ij", x.astype(np.float64), weights)  # unlike matmul, starts no BLAS threads
    largest = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(weights, axis=1)
    worst = float((np.abs(product - expected) / np.where(largest > 0, largest, 1.0)).max())
    return worst if math.isfinite(worst) else math.inf


def _structure_problem(file: GGUFFile) -> str | None:
    try:
        SmolLM3Weights.from_tensors(file.tensors, SmolLM3Config.from_metadata(file.metadata))
    except ModelFileError as error:
        return str(error)
    return None


def _prompt_problem(file: GGUFFile) -> str | None:
    try:
        tokenizer = Tokenizer.from_gguf(file.metadata, file.path)
        PromptWriter(ChatTemplate.from_gguf(file.metadata, tokenizer), tokenizer)
    except (ModelFileError, TemplateError) as error:
        return str(error)
    finally:
        file.metadata.release()
    return None
