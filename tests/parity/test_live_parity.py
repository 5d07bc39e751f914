"""The comparisons of `tests/smollm3/model/test_parity.py` with transformers and llama.cpp run live.

`make parity` runs them. Each library is looked up in the tests' environment or in that of the Python named by
NOTSO_ORACLE_PYTHON. NOTSO_DEMO_HF and NOTSO_DEMO_F32 name the demo model's trained checkpoint, a Hugging Face folder,
and its unquantized export.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from golden import live
from golden.adapters import golden_pairs, write_gguf
from golden.compare import check_floats, check_half_cache, check_random_blocks, check_trained_blocks
from golden.dequantized import write_dequantized
from golden.make_goldens import GOLDENS, GREEDY_TOKENS, demo_prompts
from golden.random_models import RANDOM, YARN_CONTEXT, write_shapes_3b
from golden.store import FOLDER, Golden, sha256
from golden.type_scores import TYPES, score

from notso.smollm3 import Engine
from notso.smollm3.hub.registry import demo_path

pytestmark = [pytest.mark.parity, pytest.mark.timeout(live.TIMEOUT_S)]

Check = Callable[[Engine, Golden], None]

OTHERS_CHANGE = 1e-4
"""Permitted difference from the golden logits for another library version or machine, relative to the logits' range."""

SCORES_APART = 0.05
"""Permitted difference of two mean negative log probabilities, relative to the exact one; half of it was measured."""

DIVERGENCE_BESIDE = 2.0
"""Permitted ratio of two divergences. Rounding differs by chance over a few hundred tokens: 1.6 and 0.6 were
measured."""


def require(library: str) -> str:
    """Return the name and version of a library. Skip the test if it is missing."""
    found = live.versions(library)
    if found is None:
        pytest.skip(live.why_missing(library))
    return found


def same_as_kept(name: str, fresh: Golden) -> bool:
    """Return whether the stored golden file equals the library's current results."""
    kept = Golden.load(name)
    return (
        kept.model_sha256 == fresh.model_sha256
        and kept.lists == fresh.lists
        and float(np.abs(kept.logits - fresh.logits).max()) < OTHERS_CHANGE * kept.logit_range
    )


@pytest.mark.parametrize(
    ("name", "context", "check"),
    [
        ("random_f32", None, check_floats),
        ("random_half_cache", None, check_half_cache),
        ("random_yarn", YARN_CONTEXT, check_floats),
    ],
)
def test_random_weights_match_transformers(name: str, context: int | None, check: Check, tmp_path: Path) -> None:
    require("transformers")
    fresh = GOLDENS[name](tmp_path)
    path = RANDOM.write(tmp_path / "ours.gguf", context=context)
    with Engine.load(path, context_tokens=context and 2 * context, kv="f16") as engine:
        check(engine, fresh)
    assert same_as_kept(name, fresh)


def test_adapter_matches_peft(tmp_path: Path) -> None:
    require("peft")
    fresh = GOLDENS["random_adapter"](tmp_path)
    path = RANDOM.write(tmp_path / "ours.gguf")
    file = write_gguf(tmp_path / "ours-adapter.gguf", golden_pairs(path))
    with Engine.load(path, kv="f16", adapters=[f"a={file}"]) as engine:
        check_floats(engine, fresh, "a")
    assert same_as_kept("random_adapter", fresh)


def test_trained_weights_match_transformers(tmp_path: Path) -> None:
    require("transformers")
    fresh = GOLDENS["demo_f32"](tmp_path)
    with Engine.load(write_dequantized(demo_path(), tmp_path / "ours.gguf"), kv="f16") as engine:
        check_floats(engine, fresh)
    assert same_as_kept("demo_f32", fresh)


def test_exported_checkpoint_matches_transformers() -> None:
    """transformers runs the trained checkpoint, and our engine runs the GGUF exported from it."""
    paths = [os.environ.get(name) for name in ("NOTSO_DEMO_HF", "NOTSO_DEMO_F32")]
    if None in paths:
        pytest.skip("NOTSO_DEMO_HF and NOTSO_DEMO_F32 do not name the demo model's checkpoint and its export")
    require("transformers")
    folder, export = (Path(path or "") for path in paths)
    prompts = demo_prompts()
    said = live.ask("transformers", folder, prompts, f"--greedy={GREEDY_TOKENS}")
    everywhere = list(range(len(said.logits)))
    with Engine.load(export, kv="f16") as engine:
        check_floats(engine, Golden.of("", sha256(export), prompts, said.lists, said.logits, everywhere))


def test_quantized_trained_weights_match_llama_cpp(tmp_path: Path) -> None:
    require("llama_cpp")
    require("transformers")  # transformers writes the answers to compare
    with Engine.load(kv="f16") as engine:
        check_trained_blocks(engine, GOLDENS["demo_q4_k_m"](tmp_path))


def test_random_blocks_in_3b_shapes_match_llama_cpp(tmp_path: Path) -> None:
    require("llama_cpp")
    fresh = GOLDENS["shapes_3b"](tmp_path)
    with Engine.load(write_shapes_3b(tmp_path / "ours.gguf"), context_tokens=256, kv="f16") as engine:
        check_random_blocks(engine, fresh)


def test_stored_rope_tables_match_transformers() -> None:
    require("transformers")
    fresh = live.rope_of_the_3b()
    with np.load(FOLDER / "rope_of_the_3b.npz", allow_pickle=False) as kept:
        assert set(kept) == set(fresh)
        for name in kept:
            np.testing.assert_allclose(fresh[name], kept[name], rtol=1e-6)


@pytest.mark.parametrize("name", TYPES)
def test_scores_of_each_block_type_match_llama_cpp(name: str, tmp_path: Path) -> None:
    """Our scores match llama.cpp's, and our results are as close to float arithmetic as llama.cpp's."""
    require("llama_cpp")
    found = score(name, tmp_path)
    assert found.tokens > 500
    assert abs(found.ours - found.theirs) < SCORES_APART * max(found.exact, 0.05)
    assert found.ours_kl < DIVERGENCE_BESIDE * found.theirs_kl


def test_stored_blocks_match_current_llama_cpp(tmp_path: Path) -> None:
    require("llama_cpp")
    live.make_blocks(tmp_path / "fresh.npz", TYPES)
    with np.load(FOLDER / "llama_cpp_blocks.npz") as kept, np.load(tmp_path / "fresh.npz") as fresh:
        assert set(kept) == set(fresh)
        for entry in kept:
            np.testing.assert_array_equal(fresh[entry], kept[entry], err_msg=entry)
