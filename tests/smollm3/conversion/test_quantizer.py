"""Quantized files: close to llama.cpp's in size and format, with no larger errors; impossible requests are rejected."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from golden import quantized
from golden.random_models import RandomModel
from golden.reordered import write_reordered
from smollm3.conversion.hf_folder_of import write_folder

from notso.qtensor import F32, GGUFFile, OperandError, QTensor
from notso.smollm3 import Engine, InvalidRequestError, ModelFileError
from notso.smollm3.conversion.converter import convert
from notso.smollm3.conversion.importance import WINDOW_TOKENS
from notso.smollm3.conversion.quantizer import MIXES, quantize
from notso.smollm3.hub.registry import demo_path

SMALL = RandomModel(layers=8, hidden=256, ffn=256, heads=2, kv_heads=1, head_dim=128, vocab=400)
TEXT = ("numbers", "words and words, over and over again. " * 50)
FORMATS = {
    "Q4_K_M": {"F32", "Q4_K", "Q6_K"},
    "Q5_K_M": {"F32", "Q5_K", "Q6_K"},
    "Q6_K": {"F32", "Q6_K"},
    "Q8_0": {"F32", "Q8_0"},
}
DEFAULT = ("Q4_K_M", "Q8_0")
LONG = pytest.mark.long("conversion")
PERPLEXITY_MARGIN = 1.005
"""Maximum ratio of our perplexity to llama.cpp's."""


@pytest.mark.parametrize("mix", [mix if mix in DEFAULT else pytest.param(mix, marks=LONG) for mix in MIXES])
def test_every_mix_is_quantized_equally_from_file_and_folder(tmp_path: Path, mix: str) -> None:
    source, out = SMALL.write(tmp_path / "floats.gguf"), tmp_path / "made.gguf"
    seen: list[tuple[str, int, int]] = []
    size = quantize(source, out, mix, progress=lambda *told: seen.append(told))
    assert seen[-1] == ("writing", size, size)
    with GGUFFile.open(source) as floats, GGUFFile.open(out) as made:
        assert list(made.tensors) == list(floats.tensors)
        assert {tensor.format.name for tensor in made.tensors.values()} == FORMATS[mix]
        added = {"general.quantization_version": 2, "general.file_type": gguf.LlamaFileType[f"MOSTLY_{_theirs(mix)}"]}
        assert dict(made.metadata) == dict(floats.metadata) | added
    quantize(source, tmp_path / "again.gguf", mix, threads=1)
    assert out.read_bytes() == (tmp_path / "again.gguf").read_bytes()
    folder = write_folder(SMALL, tmp_path / "folder")
    quantize(folder, tmp_path / "of-folder.gguf", mix)
    with GGUFFile.open(out) as made, GGUFFile.open(tmp_path / "of-folder.gguf") as other:
        for name, tensor in made.tensors.items():
            assert tensor.data.tobytes() == other.tensors[name].data.tobytes(), name
    with Engine.load(out, context_tokens=64) as engine:
        assert np.isfinite(engine.logits([1, 2, 3])).all()


def _theirs(mix: str) -> str:
    return {"Q4_K_M": "Q4_K_M", "Q5_K_M": "Q5_K_M"}.get(mix, mix)


def test_calibration_text_determines_column_importance(tmp_path: Path) -> None:
    """A text gives the importance of columns. A file and a folder give equal results, and metadata name the text."""
    source = SMALL.write(tmp_path / "floats.gguf")
    told: list[str] = []
    quantize(source, tmp_path / "made.gguf", "Q4_K_M", TEXT, 1, lambda what, done, total: told.append(what))
    assert list(dict.fromkeys(told)) == ["measuring", "writing"]
    quantize(source, tmp_path / "plain.gguf", "Q4_K_M", threads=1)
    folder = write_folder(SMALL, tmp_path / "folder")
    told.clear()
    quantize(folder, tmp_path / "of-folder.gguf", "Q4_K_M", TEXT, 1, lambda what, done, total: told.append(what))
    assert list(dict.fromkeys(told)) == ["converting", "measuring", "writing"]
    assert {path.name for path in tmp_path.iterdir()} == {
        *("floats.gguf", "made.gguf", "plain.gguf", "folder", "of-folder.gguf")
    }
    with (
        GGUFFile.open(tmp_path / "made.gguf") as made,
        GGUFFile.open(tmp_path / "plain.gguf") as plain,
        GGUFFile.open(tmp_path / "of-folder.gguf") as other,
    ):
        assert made.metadata["quantize.imatrix.dataset"] == "numbers"
        assert made.metadata["quantize.imatrix.entries_count"] == 7 * SMALL.layers + 1
        assert made.metadata["quantize.imatrix.chunks_count"] >= 1
        differing = {name for name, each in made.tensors.items() if bytes(each.data) != bytes(plain.tensors[name].data)}
        assert "blk.0.attn_q.weight" in differing and "blk.7.ffn_down.weight" in differing
        assert "blk.0.attn_norm.weight" not in differing
        for name, tensor in made.tensors.items():
            assert tensor.data.tobytes() == other.tensors[name].data.tobytes(), name


@LONG
def test_quantization_error_is_no_worse_than_llama_cpp(tmp_path: Path) -> None:
    """Trained weights that blocks do not represent exactly; llama.cpp's results are in golden/quantized.json."""
    theirs = quantized.load()
    model = write_reordered(demo_path(), tmp_path / "f32.gguf")
    known = quantized.measured(model)
    for mix, important, judged in (("Q4_K_M", True, True), ("Q5_K_M", False, False)):
        out, name = tmp_path / "made.gguf", quantized.key(mix, important)
        quantize(model, out, mix, ("conversations", quantized.text()) if important else None)
        assert quantized.weight_error(out, model, known) < theirs[name].error, name
        if judged:
            ours = quantized.perplexity(out)
            assert ours < PERPLEXITY_MARGIN * theirs[name].perplexity, name


def test_gguf_package_reads_the_quantized_file(tmp_path: Path) -> None:
    source, out = SMALL.write(tmp_path / "floats.gguf"), tmp_path / "made.gguf"
    quantize(source, out, "Q5_K_M", TEXT, 1)
    tensors = gguf.GGUFReader(out).tensors
    with GGUFFile.open(out) as ours:
        assert {each.name for each in tensors} == ours.tensors.keys()
        for theirs in tensors:
            mine = ours.tensors[theirs.name]
            assert theirs.tensor_type.name == mine.format.name
            numbers = gguf.quants.dequantize(theirs.data, theirs.tensor_type)
            np.testing.assert_array_equal(numbers.reshape(mine.shape), mine.dequantize().reshape(mine.shape))


def test_quantized_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"demo.gguf is already quantized: 'token_embd.weight' is Q6_K"):
        quantize(demo_path(), tmp_path / "made.gguf")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("mix", "text", "words"),
    [
        ("Q2_K", None, "type 'Q2_K' is not supported; choices: Q4_K_M, Q5_K_M, Q6_K, Q8_0"),
        ("Q4_K_M", ("short", "a few words"), f"at least one window of {WINDOW_TOKENS}"),
    ],
)
def test_refused_quantization_leaves_no_files(
    tmp_path: Path, mix: str, text: tuple[str, str] | None, words: str
) -> None:
    for source in (SMALL.write(tmp_path / "floats.gguf"), write_folder(SMALL, tmp_path / "folder")):
        with pytest.raises(InvalidRequestError, match=words):
            quantize(source, tmp_path / "made.gguf", mix, text)
    assert {path.name for path in tmp_path.iterdir()} == {"floats.gguf", "folder"}


def test_rows_that_do_not_fill_blocks_are_refused(tmp_path: Path) -> None:
    odd = RandomModel(layers=1)
    with pytest.raises(InvalidRequestError, match="row length 384 is not a multiple of Q6_K"):
        quantize(odd.write(tmp_path / "floats.gguf"), tmp_path / "made.gguf", "Q6_K")
    quantize(tmp_path / "floats.gguf", tmp_path / "made.gguf", "Q8_0")


def test_infinite_weights_are_refused(tmp_path: Path) -> None:
    class Broken(RandomModel):
        def weights(self):  # type: ignore[no-untyped-def]
            for name, values in super().weights():
                if name == "blk.0.ffn_up.weight":
                    values[3, 5] = np.inf
                yield name, values

    broken = Broken(**{name: getattr(SMALL, name) for name in SMALL.__dataclass_fields__})
    said = "tensor 'blk.0.ffn_up(.weight)?': NaN or infinity cannot be stored as Q4_K"
    folder = write_folder(broken, tmp_path / "folder")
    for source in (broken.write(tmp_path / "floats.gguf"), folder):
        with pytest.raises(OperandError, match=said):
            quantize(source, tmp_path / "made.gguf")
    with pytest.raises(OperandError, match=r"tensor 'blk\.0\.ffn_up': NaN or infinity cannot be stored as F16"):
        convert(folder, tmp_path / "made.gguf", "F16")
    assert {path.name for path in tmp_path.iterdir()} == {"floats.gguf", "folder"}


@pytest.mark.parametrize(("mix", "most"), [("Q4_K_M", "Q4_K"), pytest.param("Q5_K_M", "Q5_K", marks=LONG)])
def test_output_tensor_is_quantized_with_more_bits(tmp_path: Path, mix: str, most: str) -> None:
    """As in llama.cpp's quantizer, the tensor for logits has more bits; without lm_head, that is the embedding."""
    for tied, embedding in ((True, "Q6_K"), (False, most)):
        model, made = replace(SMALL, tied=tied), tmp_path / f"made-{tied}.gguf"
        folder = write_folder(model, tmp_path / f"folder-{tied}")
        quantize(model.write(tmp_path / f"floats-{tied}.gguf"), made, mix)
        convert(folder, tmp_path / "converted.gguf", mix)
        for path in (made, tmp_path / "converted.gguf"):
            with GGUFFile.open(path) as file:
                found = {name: tensor.format.name for name, tensor in file.tensors.items()}
            assert found["token_embd.weight"] == embedding
            assert found.get("output.weight") == (None if tied else "Q6_K")


def test_norm_weights_stay_unquantized(tmp_path: Path) -> None:
    source = SMALL.write(tmp_path / "floats.gguf")
    quantize(source, tmp_path / "made.gguf", "Q8_0")
    with GGUFFile.open(source) as floats, GGUFFile.open(tmp_path / "made.gguf") as made:
        norm: QTensor = made.tensors["blk.3.attn_norm.weight"]
        assert norm.format == F32
        assert norm.data.tobytes() == floats.tensors["blk.3.attn_norm.weight"].data.tobytes()
