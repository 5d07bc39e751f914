"""Damaged cache files of every kind: the engine's answer stays the same as without a cache."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from chaos.ledger import LONG, Ledger
from smollm3.kv.test_offload import PROMPT, answer, load

from notso.smollm3 import Event
from notso.smollm3.kv.kv_cache import KVFormat

TRIES = 100 if LONG else 1  # for each kind of damage
FORMATS: dict[str, KVFormat] = {"whole": "k8v8", "foreign": "f16"}
KINDS = ("flip", "cut", "swap", "wrong model", "old version")


def harm(kind: str, files: list[Path], foreign: list[Path], chance: random.Random) -> None:
    """Damage one or more files."""
    victims = chance.sample(files, chance.randint(1, len(files)))
    for path, other in zip(victims, victims[1:] + victims[:1], strict=True):
        data = bytearray(path.read_bytes())
        match kind:
            case "flip":
                for _ in range(chance.choice((1, 1, 2, 9))):
                    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
                path.write_bytes(data)
            case "cut":
                path.write_bytes(data[: chance.randrange(len(data))])
            case "swap" if other != path:
                path.write_bytes(other.read_bytes())
                other.write_bytes(data)
            case "swap":
                path.write_bytes(data[::-1])
            case "wrong model":
                path.write_bytes(chance.choice(foreign).read_bytes())
            case "old version":
                data[12] = 0  # the header's layout version
                path.write_bytes(data)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path], list[Event]]:
    """Return a folder with cache files, files of another model, and the answer without a cache."""
    folder = tmp_path_factory.mktemp("cache")
    with load(None) as engine:
        cold, _ = answer(engine, PROMPT)
    for name, kv in FORMATS.items():
        with load(folder / name, kv) as engine:
            answer(engine, PROMPT)
    with load(folder / "whole") as engine:
        assert answer(engine, PROMPT) == (cold, len(PROMPT) - 1), "undamaged files are used"
    return folder / "whole", [path for path in (folder / "foreign").rglob("*.kv*") if path.is_file()], cold


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_cache_files_do_not_change_answers(
    ledger: Ledger, tmp_path: Path, cache: tuple[Path, list[Path], list[Event]], kind: str
) -> None:
    whole, foreign, cold = cache
    failed = harmed = misses = 0
    for seed in range(TRIES):
        folder = shutil.copytree(whole, tmp_path / "harmed")
        before = [path for path in folder.rglob("*.kv*") if path.is_file()]
        contents = {path: path.read_bytes() for path in before}
        harm(kind, before, foreign, random.Random(seed))
        changed = sum(path.read_bytes() != contents[path] for path in before)
        with load(folder) as engine:
            again, cached = answer(engine, PROMPT)
        failed += again != cold or (changed > 0 and cached == len(PROMPT) - 1)
        harmed, misses = harmed + changed, misses + (cached < len(PROMPT) - 1)
        shutil.rmtree(folder)
    ledger.note(
        "engine",
        f"damaged cache files: {kind}",
        f"{harmed} files in {TRIES} restarts; each answer equals that of a cold cache, {misses} recomputed lost blocks",
        failed,
    )
