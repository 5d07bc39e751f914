"""`verify_file` finds no faults in valid files, and finds each kind of damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from notso.qtensor import CPU
from notso.qtensor.errors import GGUFError
from notso.qtensor.formats import F32, FORMATS, MXFP4, Q4_K, Q6_K, Q8_0, Format
from notso.qtensor.gguf import GGUFFile
from notso.qtensor.reference.random_blocks import random_blocks
from notso.qtensor.tensor import QTensor
from notso.smollm3.diagnostics.synth import write_synthetic
from notso.smollm3.diagnostics.verification import (
    FLOAT_TOLERANCE,
    QUANTIZED_TOLERANCE,
    check_tensor,
    verify_file,
    verify_tensors,
)
from notso.smollm3.hub import registry

SIZES = {"layers": 4, "hidden": 256, "ffn": 512, "heads": 4, "kv_heads": 1, "vocab": 1300}


@pytest.fixture
def path(tmp_path: Path, own_home: Path, small_metadata: dict[str, Any]) -> Path:
    path = tmp_path / "small.gguf"
    write_synthetic(path, **SIZES, tokenizer=small_metadata, template="{{ messages[-1].content }}")
    return path


def random_tensor(format: Format, rows: int, cols: int, seed: int = 1) -> QTensor:
    packed = random_blocks(format, rows * cols // format.block_values, np.random.default_rng(seed))
    return QTensor("w", format, (rows, cols), packed.reshape(-1))


@pytest.mark.parametrize("cols", [256, 1024, 2816])
@pytest.mark.parametrize("format", list(FORMATS.values()), ids=str)
def test_valid_tensors_of_every_format_pass(format: Format, cols: int) -> None:
    for rows in (1, 7, 300):
        check = check_tensor(random_tensor(format, rows, cols, seed=rows))
        assert check.problem is None
        assert check.rows_checked == min(rows, 128)
        assert check.tolerance == (FLOAT_TOLERANCE if format.is_float else QUANTIZED_TOLERANCE)
        assert check.worst_error is not None and (check.worst_error > 0 or rows == 1)


def test_valid_file_passes(path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    found = verify_file(path, progress=lambda *call: calls.append(call))
    assert found.ok and found.problems == () and found.structure_problem is None
    assert len(found.tensors) == 2 + 9 * 4 and found.known_as is None
    assert found.sha256 == registry.sha256_of(path) == registry.stored_hash(path)
    assert found.worst is not None and found.worst.worst_error == max(c.worst_error or 0 for c in found.tensors)
    norms = [check for check in found.tensors if len(check.shape) == 1]
    assert len(norms) == 9 and all(check.worst_error is None and check.rows_checked == 0 for check in norms)
    assert [call[0] for call in calls].index("checking") == calls.index(next(c for c in calls if c[0] == "checking"))
    assert calls[-1][0] == "checking" and calls[-1][1] == calls[-1][2] == sum(
        t.nbytes for t in GGUFFile.open(path).tensors.values()
    )
    plain = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert plain["ok"] is True and plain["worst"]["name"] == found.worst.name and len(plain["tensors"]) == 38


def test_a_published_file_is_recognized(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = registry.KnownFile("small:test", "a/b", "0" * 40, "x.gguf", path.stat().st_size, registry.sha256_of(path))
    monkeypatch.setattr(registry, "KNOWN_FILES", (known,))
    assert verify_file(path).known_as == "small:test"
    assert verify_file(path, hash_file=False).known_as is None


@pytest.mark.parametrize(("format", "at"), [(Q4_K, 0), (Q4_K, 2), (Q6_K, 208), (Q8_0, 0)], ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_invalid_scale_in_an_unsampled_row_is_found(format: Format, at: int, bad: float) -> None:
    tensor = random_tensor(format, 301, 512)
    raw = tensor.data.copy()
    start = 250 * tensor.row_bytes + format.block_bytes + at  # row 250 is not in the sample
    raw[start : start + 2] = np.frombuffer(np.float16(bad).tobytes(), np.uint8)
    check = check_tensor(QTensor("w", format, tensor.shape, raw))
    assert check.problem == "row 250 has a value that is NaN or infinite"
    assert check.worst_error is None


@pytest.mark.parametrize(("exponent", "is_valid"), [(252, True), (253, False), (254, False), (255, False)])
def test_overflow_of_an_mxfp4_block_in_an_unsampled_row_is_found(exponent: int, is_valid: bool) -> None:
    tensor = random_tensor(MXFP4, 301, 512)
    raw = tensor.data.copy()
    start = 251 * tensor.row_bytes + MXFP4.block_bytes  # row 251 is not in the sample
    raw[start : start + MXFP4.block_bytes] = [exponent] + [0x77] * 16
    bad = QTensor("w", MXFP4, tensor.shape, raw)
    assert np.isfinite(bad.dequantize()).all() == is_valid
    assert check_tensor(bad).problem == (None if is_valid else "row 251 has a value that is NaN or infinite")


def test_nan_in_norm_weights_is_found() -> None:
    values = np.ones(256, np.float32)
    values[3] = np.nan
    check = check_tensor(QTensor("norm", F32, (256,), values.view(np.uint8)))
    assert check.problem == "row 0 has a value that is NaN or infinite"


@pytest.mark.parametrize("format", list(FORMATS.values()), ids=str)
def test_wrong_matrix_product_is_found(format: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel swaps two weights of a row, is one percent off, has one wrong last bit, or gives NaN."""
    tensor = random_tensor(format, 40, 512)
    right = CPU.matmul

    def swapped(x: np.ndarray, weight: QTensor, out: np.ndarray) -> None:
        x = x.copy()
        x[:, [5, 6]] = x[:, [6, 5]]
        right(x, weight, out)

    def off(x: np.ndarray, weight: QTensor, out: np.ndarray) -> None:
        right(x, weight, out)
        out += np.float32(0.01) * np.linalg.norm(x) * np.linalg.norm(weight.dequantize()[0])

    def rounded(x: np.ndarray, weight: QTensor, out: np.ndarray) -> None:
        right(x, weight, out)
        out[1, 7] = np.nextafter(out[1, 7], np.float32(9))

    def broken(x: np.ndarray, weight: QTensor, out: np.ndarray) -> None:
        right(x, weight, out)
        out[1, 7] = np.nan

    assert check_tensor(tensor).problem is None
    for wrong in (swapped, off, broken, *([] if format.is_float else [rounded])):
        monkeypatch.setattr(CPU, "matmul", staticmethod(wrong))
        check = check_tensor(tensor)
        assert check.problem is not None and check.worst_error is not None
        assert check.problem.startswith(
            "relative error" if wrong in (off, broken) else ("relative error", "the product")
        )


def test_damage_in_a_file_is_reported_by_tensor(path: Path) -> None:
    with GGUFFile.open(path) as file:
        offset = file.data_offset + 210 * 77 + 208  # token_embd is the first tensor; this is the scale of its row 77
    raw = bytearray(path.read_bytes())
    raw[offset : offset + 2] = np.float16(np.inf).tobytes()
    path.write_bytes(raw)
    found = verify_file(path)
    assert not found.ok
    assert found.problems == ("token_embd.weight: row 77 has a value that is NaN or infinite",)


def test_missing_tensor_is_reported(path: Path) -> None:
    raw = path.read_bytes().replace(b"blk.2.attn_q.weight", b"blk.2.attn_Q.weight")
    path.write_bytes(raw)
    found = verify_file(path, hash_file=False)
    assert not found.ok and "blk.2.attn_q.weight" in found.problems[0] and found.sha256 is None
    assert all(check.problem is None for check in found.tensors)


def test_the_same_seed_gives_the_same_errors(path: Path) -> None:
    with GGUFFile.open(path) as file:
        first, again = list(verify_tensors(file, seed=1)), list(verify_tensors(file, seed=1))
        assert first == again != list(verify_tensors(file, seed=2))


def test_truncated_file_raises_gguf_error(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(GGUFError):
        verify_file(tmp_path / "x.gguf")


@pytest.mark.parametrize(
    ("template", "told"),
    [("x", "omits the user's message"), (" ", "prints nothing"), ("{% if %}", "chat template says")],
)
def test_unusable_chat_template_is_reported(
    tmp_path: Path, small_metadata: dict[str, Any], template: str, told: str
) -> None:
    path = tmp_path / "small.gguf"
    write_synthetic(path, **SIZES, tokenizer=small_metadata, template=template)
    found = verify_file(path, hash_file=False)
    assert found.structure_problem is None and found.prompt_problem is not None
    assert told in found.problems[0] and len(found.problems) == 1 and not found.ok


def test_vocabulary_without_chat_tokens_is_reported(path: Path, small_metadata: dict[str, Any]) -> None:
    template = "<|im_begin|>user\n{{ messages[-1].content }}<|im_end|>"
    write_synthetic(path, **SIZES, tokenizer=small_metadata, template=template)
    found = verify_file(path, hash_file=False)
    assert found.prompt_problem is not None and "<|im_begin|>" in found.prompt_problem and not found.ok
