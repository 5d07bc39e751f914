"""Sixteen adapters trained on the demo model: each gives its sentence alone, after others, and concurrently."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from golden.adapters import TrainedAdapters, write_gguf

from notso.smollm3 import Engine, RequestOptions, SamplingParams
from notso.smollm3.values.engine_config import AdapterSource

GREEDY = SamplingParams(max_tokens=16, temperature=0)
SEEDED = SamplingParams(max_tokens=16, seed=3, temperature=1.5)


@pytest.fixture(scope="module")
def trained() -> TrainedAdapters:
    return TrainedAdapters.load()


@pytest.fixture(scope="module")
def files(trained: TrainedAdapters, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("trained")
    return {
        f"n{number}": write_gguf(folder / f"n{number}.gguf", pairs, alpha=trained.alpha)
        for number, pairs in enumerate(trained.pairs)
    }


def loaded(files: dict[str, Path], *names: str) -> Engine:
    engine = Engine.load(context_tokens=256, threads=1, max_num_seqs=32)
    for name in names or files:
        engine.adapters.add(AdapterSource(name, str(files[name])))
    return engine


@pytest.fixture(scope="module")
def engine(files: dict[str, Path]) -> Iterator[Engine]:
    with loaded(files) as engine:
        yield engine


def answers(engine: Engine, prompt: str, *names: str | None, params: SamplingParams = GREEDY) -> list[str]:
    """Return the answers with these adapters, generated concurrently."""
    ids = engine.tokenize(prompt, special=True)
    running = [engine.submit(ids, params, RequestOptions(adapter=name)) for name in names]
    return ["".join(event.text for event in each.events()) for each in running]


def test_each_trained_adapter_answers_with_the_trained_name(
    engine: Engine, trained: TrainedAdapters, files: dict[str, Path]
) -> None:
    assert len(files) == 16
    for name, taught in zip(files, trained.names, strict=True):
        said = answers(engine, trained.prompt, name)[0]
        assert [each for each in trained.names if each in said] == [taught], said
    said = answers(engine, trained.prompt, None)[0]
    assert not [each for each in trained.names if each in said], said


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_sixteen_concurrent_adapters_answer_as_each_alone(
    engine: Engine, trained: TrainedAdapters, files: dict[str, Path], params: SamplingParams
) -> None:
    """Answers without an adapter between them also equal those of the model alone."""
    names = [None, *files, None]
    alone = [answers(engine, trained.prompt, name, params=params)[0] for name in names]
    engine.clear_cache()
    assert answers(engine, trained.prompt, *names, params=params) == alone
    with Engine.load(context_tokens=256, threads=1, max_num_seqs=32) as plain:
        assert answers(plain, trained.prompt, None, params=params)[0] == alone[0] == alone[-1]


def test_consecutive_adapters_match_a_cold_engine(
    engine: Engine, trained: TrainedAdapters, files: dict[str, Path]
) -> None:
    ids = engine.tokenize(trained.prompt, special=True)
    warm = [engine.logits(ids, adapter=name) for name in ("n3", "n9")]
    said = [answers(engine, trained.prompt, name)[0] for name in ("n3", "n9", "n3")]
    with loaded(files, "n9") as cold:
        assert answers(cold, trained.prompt, "n9")[0] == said[1]
        assert cold.logits(ids, adapter="n9").tobytes() == warm[1].tobytes() != warm[0].tobytes()
    assert said[0] == said[2] and trained.names[3] in said[0] and trained.names[9] in said[1]
