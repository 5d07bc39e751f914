"""Values that are defined twice, for two languages or two layers, agree."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import typer

from notso.cli.app import app
from notso.qtensor import KV_FORMATS, TILE_POSITIONS, KVFormat
from notso.qtensor.formats import MAX_BYTE_DIM
from notso.smollm3.scheduling.block_pool import BLOCK_TOKENS
from notso.smollm3.scheduling.scheduler import TILE_ROWS
from notso.smollm3.values.engine_config import DEFAULT_CACHE_BYTES, DEFAULT_LIBRARY_BYTES
from notso.smollm3.values.sampling_params import PARAMETERS, Api
from notso.web.values.settings import DEFAULT_PORT

ROOT = Path(__file__).parents[2]
NATIVE, DOCS = ROOT / "native", ROOT / "docs" / "kernels"


def stated(file: str, pattern: str) -> str:
    found = re.search(pattern, (NATIVE / file).read_text("utf-8"))
    assert found, f"{file} no longer says {pattern}"
    return found[1]


def test_positions_per_block_agree_between_native_and_python() -> None:
    assert int(stated("cache_format.h", r"kTilePositions = (\d+);")) == TILE_POSITIONS == BLOCK_TOKENS


def test_cache_formats_agree_between_native_and_python() -> None:
    names = stated("cache_format.h", r"enum class CacheFormat : int \{ ([\w, ]+) \}").split(", ")
    assert names == list(KV_FORMATS) == list(get_args(KVFormat))
    assert int(stated("cache_format.h", r"kCacheFormats = (\d+);")) == len(KV_FORMATS)
    assert int(stated("kernel_table.h", r"kMostByteDim = (\d+);")) == MAX_BYTE_DIM
    for name, bits in KV_FORMATS.items():
        assert name in ("f16", f"k{bits.key}v{bits.value}")


def test_batch_rows_per_tile_agree_between_native_and_python() -> None:
    assert int(stated("kernels/amx/activations_as_a.h", r"kMostMAsA = (\d+) \* kMostTilesAsA")) == TILE_ROWS
    assert "16 x 16" in (NATIVE / "kernel_table.h").read_text("utf-8")


def test_documents_state_the_tile_thresholds_of_the_kernels() -> None:
    amx, avx2 = (int(stated(f"kernels/{each}/tuning.h", r"kTilesFromM = (\d+);")) for each in ("amx", "avx2"))
    neon = int(stated("kernels/neon/tuning.h", r"kKeepsRowsFromM = (\d+);"))
    pattern = r"f == Format::Q4_K && [^?]*\? %s : %s;"
    first = int(stated("kernels/avx512/tuning.h", pattern % (r"(\d+)", r"\d+")))
    avx512 = int(stated("kernels/avx512/tuning.h", pattern % (r"\d+", r"(\d+)")))
    assert f"From {amx} batch rows on" in (DOCS / "tiles-amx.md").read_text("utf-8")
    assert f"from {first} to {avx2} batch rows on" in (DOCS / "README.md").read_text("utf-8")
    assert f"from {neon} batch rows on" in (DOCS / "neon.md").read_text("utf-8")
    few = f"up to {avx2 - 1} batch rows with AVX2, {avx512 - 1} with AVX-512 ({first - 1} of Q4_K, except on Intel)"
    gemv = " ".join((DOCS / "gemv.md").read_text("utf-8").split())
    assert f"{few} and {amx - 1} with AMX; more" in gemv


def test_cli_defaults_agree_with_the_layers() -> None:
    """The CLI repeats these defaults, so that `--help` need not import the layers."""
    verbs: Any = typer.main.get_command(app)
    serve = {parameter.name: parameter for parameter in verbs.commands["serve"].params}
    assert serve["port"].default == DEFAULT_PORT
    assert serve["cache_disk"].default * 10**9 == DEFAULT_CACHE_BYTES
    assert serve["library_disk"].default * 10**9 == DEFAULT_LIBRARY_BYTES


def test_documented_sampling_defaults_agree() -> None:
    stated = [
        (each.name, value, float(each.default))
        for each in PARAMETERS.values()
        for api in get_args(Api)
        for text in each.names(api).values()
        for value in re.findall(r"default (-?\d+(?:\.\d+)?)", text)
    ]
    assert len(stated) >= 10 and [each for each in stated if float(each[1]) != each[2]] == []
