"""docs/model-files.md: each row's mix of types loads, and gives the results of the same values in F32."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from golden.dequantized import write_dequantized

from notso.qtensor.formats import FORMATS_BY_NAME, Format
from notso.qtensor.gguf import GGUFFile
from notso.qtensor.gguf_writer import GGUFWriter
from notso.qtensor.reference.random_blocks import random_blocks
from notso.smollm3 import Engine
from notso.smollm3.diagnostics.synth import write_synthetic

DOC = Path(__file__).parents[3] / "docs" / "model-files.md"
ROW = re.compile(r"^\| [^|]*\| (\w+) \| (\w+) \| ([\w, ]+) \|$", re.MULTILINE)
ROWS = [
    (name, FORMATS_BY_NAME[head], [FORMATS_BY_NAME[part.split()[1]] for part in others.split(", ")])
    for name, head, others in ROW.findall(DOC.read_text())
]

SHAPE = {"layers": 4, "hidden": 256, "ffn": 512, "heads": 8, "kv_heads": 2, "vocab": 3200}
IDS = list(range(300, 324))

ROUNDED = 0.05
"""Maximum difference of a logit, relative to the logit range, because activations are rounded to bytes."""


def write_mix(out: Path, head: Format, others: list[Format], plain: Path) -> Path:
    """Write a copy of `plain` with random blocks: the embedding in `head`, the other matrices in `others` by turns."""
    rng = np.random.default_rng(1)
    turn = 0
    with GGUFFile.open(plain) as file, GGUFWriter(out, durable=False) as writer:
        for key, value in file.metadata.items():
            writer.add(key, value, file.metadata_types[key])
        for tensor in file.tensors.values():
            format, data = tensor.format, tensor.data
            if len(tensor.shape) == 2:
                format = head
                if tensor.name != "token_embd.weight":
                    format, turn = others[turn % len(others)], turn + 1
                count = int(np.prod(tensor.shape)) // format.block_values
                data = random_blocks(format, count, rng, 0.05).reshape(-1)
            writer.add_tensor(tensor.name, tensor.shape, format, data)
    return out


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain") / "plain.gguf"
    write_synthetic(path, formats="F32", **SHAPE)
    return path


def test_model_files_doc_lists_every_format() -> None:
    assert len(ROWS) >= 38
    named = {format for _, head, others in ROWS for format in (head, *others)}
    assert named == set(FORMATS_BY_NAME.values()) - {FORMATS_BY_NAME["F32"]}


@pytest.mark.parametrize(("name", "head", "others"), ROWS, ids=[f"{n}-{i}" for i, (n, _, _) in enumerate(ROWS)])
def test_documented_format_mix_matches_the_same_values_in_f32(
    name: str, head: Format, others: list[Format], plain: Path, tmp_path: Path
) -> None:
    mixed = write_mix(tmp_path / f"SmolLM3-{name}.gguf", head, others, plain)
    logits = []
    for path in (mixed, write_dequantized(mixed, tmp_path / "floats.gguf")):
        with Engine.load(path, kv="f16", context_tokens=64, threads=1) as engine:
            logits.append(engine.logits(IDS))
    found, exact = logits
    assert np.abs(found - exact).max() < ROUNDED * np.ptp(exact)
    assert not np.array_equal(found, exact) or head.is_float
