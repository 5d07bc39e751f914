"""LoRA adapters: their effect, isolation from other requests, and invalid files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from golden.adapters import ALPHA, Pairs, random_pairs, write_gguf, write_merged, write_peft
from golden.random_models import RANDOM
from smollm3.two_turns import until

from notso.qtensor import F16, F32, MemoryLimit, NotsoError
from notso.smollm3 import Engine, InvalidRequestError, Message, OutOfMemoryError, RequestOptions, SamplingParams
from notso.smollm3.engine import adapters
from notso.smollm3.model import lora
from notso.smollm3.values.engine_config import AdapterSource

SMALL = replace(RANDOM, layers=4, hidden=256, ffn=384, vocab=700)
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=12, seed=5, ignore_eos=True)
IDS = np.random.default_rng(2).integers(0, SMALL.vocab, 150).tolist()
TOLERANCE = 0.02
"""For logits of about 10, because sums have another order, and keys and values are then rounded to half precision."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SMALL.write(tmp_path_factory.mktemp("base") / "base.gguf")


@pytest.fixture
def engine(base: Path) -> Iterator[Engine]:
    with Engine.load(base, context_tokens=512, threads=1, kv="f16") as engine:
        yield engine


def add(engine: Engine, name: str, path: Path, scale: float = 1.0) -> None:
    engine.adapters.add(AdapterSource(name, str(path), scale))


def answers(engine: Engine, *names: str | None, params: SamplingParams = GREEDY, ids: list[int] = IDS) -> list[str]:
    """Return the answers with these adapters, generated concurrently."""
    running = [engine.submit(ids, params, RequestOptions(adapter=name)) for name in names]
    return ["".join(event.text for event in each.events()) for each in running]


@pytest.mark.parametrize(("alpha", "scale"), [(ALPHA, 1.0), (12.0, 0.7), (0.0, 0.5)])
@pytest.mark.parametrize("form", ["gguf", "peft"])
def test_adapter_logits_match_the_merged_model(
    base: Path, engine: Engine, tmp_path: Path, form: str, alpha: float, scale: float
) -> None:
    """Alpha 0 in a GGUF file means that the scale is not divided by the rank."""
    if form == "peft" and alpha == 0:
        alpha = 4.0
    pairs = random_pairs(engine.config, 1)
    file = (
        write_gguf(tmp_path / "a.gguf", pairs, alpha=alpha)
        if form == "gguf"
        else write_peft(tmp_path / "a", pairs, engine.config.head_dim, alpha=alpha)
    )
    add(engine, "a", file, scale)
    merged = write_merged(tmp_path / "merged.gguf", base, pairs, scale * alpha / 8 if alpha else scale)
    with Engine.load(merged, context_tokens=512, threads=1, kv="f16") as other:
        wanted = other.logits(IDS)
    with_adapter = engine.logits(IDS, adapter="a")
    assert np.abs(with_adapter - wanted).max() < TOLERANCE
    assert np.abs(engine.logits(IDS) - wanted).max() > 50 * TOLERANCE


def test_rslora_scale_divides_alpha_by_sqrt_of_rank(engine: Engine, tmp_path: Path) -> None:
    pairs = random_pairs(engine.config, 1, rank=9)
    add(engine, "rs", write_peft(tmp_path / "rs", pairs, engine.config.head_dim, alpha=6.0, use_rslora=True))
    add(engine, "same", write_gguf(tmp_path / "same.gguf", pairs, alpha=18.0))
    np.testing.assert_allclose(engine.logits(IDS, adapter="rs"), engine.logits(IDS, adapter="same"), atol=TOLERANCE)


def test_f16_adapter_weights_stay_f16_in_memory(engine: Engine, tmp_path: Path) -> None:
    pairs = random_pairs(engine.config, 1)
    add(engine, "halves", write_gguf(tmp_path / "halves.gguf", pairs, format=F16))
    add(engine, "floats", write_gguf(tmp_path / "floats.gguf", pairs, format=F32))
    halves, floats = (engine.adapters.infos[name].size_bytes for name in ("halves", "floats"))
    assert 2 * halves == floats
    assert engine.logits(IDS, adapter="halves").tobytes() == engine.logits(IDS, adapter="floats").tobytes()


def test_zero_adapter_leaves_logits_and_answers_unchanged(engine: Engine, tmp_path: Path) -> None:
    add(engine, "zero", write_gguf(tmp_path / "zero.gguf", random_pairs(engine.config, 1, size=0.0)))
    assert engine.logits(IDS, adapter="zero").tobytes() == engine.logits(IDS).tobytes()
    assert answers(engine, "zero", params=SEEDED) == answers(engine, None, params=SEEDED)


def some_adapters(engine: Engine, folder: Path) -> list[str]:
    roles = [("q_proj",), ("gate_proj", "down_proj"), ("k_proj", "v_proj", "o_proj"), ("up_proj",)]
    for number, those in enumerate([*roles, *roles]):
        pairs = random_pairs(engine.config, number, rank=1 + number, size=0.3, roles=those)
        add(engine, f"number{number}", write_gguf(folder / f"{number}.gguf", pairs))
    return list(engine.adapters.infos)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_batched_adapters_answer_as_each_adapter_alone(engine: Engine, tmp_path: Path, params: SamplingParams) -> None:
    names = [None, *some_adapters(engine, tmp_path), None]
    alone = [answers(engine, name, params=params)[0] for name in names]
    assert len(set(alone)) > len(names) // 2, "the adapters must give different answers"
    engine.clear_cache()
    mixed = [name for pair in zip(names, reversed(names), strict=True) for name in pair]
    assert answers(engine, *mixed, params=params) == [alone[names.index(name)] for name in mixed]


def test_prefix_cache_is_isolated_per_adapter(base: Path, engine: Engine, tmp_path: Path) -> None:
    """Adapters with other weights do not share cached prefixes, even under the same name."""
    first, second = (
        write_gguf(tmp_path / f"{seed}.gguf", random_pairs(engine.config, seed, size=0.3)) for seed in (1, 2)
    )
    add(engine, "a", first)
    add(engine, "b", second)
    warm = [answers(engine, name)[0] for name in ("a", "b", None, "b")]
    assert warm[1] == warm[3] and len(set(warm)) == 3
    with Engine.load(base, context_tokens=512, threads=1, kv="f16") as cold:
        add(cold, "b", second)
        assert answers(cold, "b")[0] == warm[1]
        cold.adapters.remove("b")
        add(cold, "b", first)
        assert answers(cold, "b")[0] == warm[0]


def test_running_answer_keeps_its_removed_adapter(engine: Engine, tmp_path: Path) -> None:
    add(engine, "a", write_gguf(tmp_path / "a.gguf", random_pairs(engine.config, 1, size=0.3)))
    long = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
    whole = answers(engine, "a", params=long)
    running = engine.submit(IDS, long, RequestOptions(adapter="a"))
    until(lambda: any(event.kind == "text" for event in running.read()))
    engine.adapters.remove("a")
    assert ["".join(event.text for event in running.events())] == whole
    with pytest.raises(InvalidRequestError, match="not loaded"):
        answers(engine, "a")
    assert not any(shape[2] for shape in engine._runner._captured), "recorded steps must not keep removed adapters"


def test_engine_load_adds_configured_adapters(base: Path, engine: Engine, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "with:colon.gguf", random_pairs(engine.config, 1, size=0.3))
    with Engine.load(base, context_tokens=512, threads=1, kv="f16", adapters=[f"a={file}", f"half={file}:0.5"]) as made:
        assert [info.scale for info in made.adapters.infos.values()] == [1.0, 0.5]
        assert made.logits(IDS, adapter="a").tobytes() != made.logits(IDS, adapter="half").tobytes()
        with pytest.raises(InvalidRequestError, match="already loaded"):
            add(made, "a", file)


@pytest.mark.parametrize("text", ["a", "=file", "a=", "a b=file", "a=file:nan", ".a=file"])
def test_malformed_adapter_option_is_rejected(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        Engine.load(adapters=[text])


def test_chat_messages_use_the_selected_adapter(tmp_path: Path) -> None:
    with Engine.load(context_tokens=1024, threads=1) as engine:
        add(engine, "a", write_gguf(tmp_path / "a.gguf", random_pairs(engine.config, 3, size=0.2)))
        messages = [Message("user", "Hello! What is your name?")]
        said = [
            "".join(event.text for event in engine.submit(messages, GREEDY, RequestOptions(adapter=name)).events())
            for name in (None, "a", None)
        ]
    assert said[0] == said[2] != said[1]


def damaged(pairs: Pairs) -> Pairs:
    first, *rest = pairs
    a, b = pairs[first]
    a = a.copy()
    a[0, 0] = np.nan
    return {first: (a, b)} | {key: pairs[key] for key in rest}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path, pairs: write_gguf(path, pairs, general__type="model"), "not a LoRA adapter"),
        (lambda path, pairs: write_gguf(path, pairs, adapter__type=None), "not a LoRA adapter"),
        (lambda path, pairs: write_gguf(path, pairs, general__architecture="llama"), "'llama', not for smollm3"),
        (lambda path, pairs: write_gguf(path, pairs, alpha=float("inf")), "alpha"),
        (lambda path, pairs: write_gguf(path, damaged(pairs)), "contains NaN or infinity"),
        (lambda path, pairs: write_gguf(path, {}), "it has no tensors"),
        (lambda path, pairs: write_gguf(path, {(0, "attn_norm"): pairs[0, "q_proj"]}), "attn_norm"),
        (
            lambda path, pairs: write_gguf(path, pairs | {("00", "q_proj"): pairs[1, "q_proj"]}),
            "it changes 'blk.00.attn",
        ),
        (lambda path, pairs: write_gguf(path, {(9, "q_proj"): pairs[0, "q_proj"]}), "layer 9, but this model has 4"),
        (lambda path, pairs: write_gguf(path, {(0, "q_proj"): pairs[0, "k_proj"]}), "layer 0, q_proj: B has shape"),
        (lambda path, pairs: path.write_bytes(b"GGUF" + bytes(7)) and path, "version"),
    ],
)
def test_unusable_adapter_file_is_rejected_with_the_reason(engine: Engine, tmp_path: Path, make, words: str) -> None:  # type: ignore[no-untyped-def]
    path = make(tmp_path / "bad.gguf", random_pairs(engine.config, 1))
    with pytest.raises(NotsoError, match=words):
        add(engine, "bad", path)
    assert not engine.adapters.infos


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"alpha_pattern": {"q_proj": "3"}}, "alpha_pattern must have numbers as values"),
        ({"lora_alpha": "much"}, "lora_alpha"),
        ({"r": 0}, "r: a rank must be an integer of at least 1"),
        ({"r": 10**400}, "r must be numbers"),
        ({"lora_alpha": 10**400}, "lora_alpha and r must be"),
        ({"peft_type": "IA3"}, "LORA"),
        ({"rank_pattern": {"q_proj": 2}}, r"has rank 8, but adapter_config.json \(r, rank_pattern\) specifies 2"),
    ],
)
def test_unsupported_peft_setting_is_rejected_by_name(
    engine: Engine, tmp_path: Path, settings: dict[str, object], words: str
) -> None:
    folder = write_peft(tmp_path / "bad", random_pairs(engine.config, 1), engine.config.head_dim, **settings)
    with pytest.raises(NotsoError, match=words):
        add(engine, "bad", folder)


def test_invalid_adapter_is_rejected_before_copying_tensors(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensors may be holes in a sparse file, which is short on disk but larger than memory."""

    def copied(tensor: object, **changes: object) -> None:
        pytest.fail("the tensors were copied")

    monkeypatch.setattr(lora, "replace", copied)
    pairs = random_pairs(engine.config, 1)
    (outputs, _), (_, inputs) = pairs[0, "q_proj"][1].shape, pairs[0, "q_proj"][0].shape
    wide = np.zeros((600, inputs), np.float32), np.zeros((outputs, 600), np.float32)
    for bad, words in (({(9, "q_proj"): pairs[0, "q_proj"]}, "layer 9"), ({(0, "q_proj"): wide}, "r from 1 to 512")):
        with pytest.raises(NotsoError, match=words):
            add(engine, "bad", write_gguf(tmp_path / "bad.gguf", bad))
    monkeypatch.setattr(adapters, "available_memory", lambda: MemoryLimit("nothing", 10))
    with pytest.raises(OutOfMemoryError, match="more than the 10 bytes"):
        add(engine, "bad", write_gguf(tmp_path / "bad.gguf", pairs))


def test_peft_folder_with_missing_lora_b_is_rejected(engine: Engine, tmp_path: Path) -> None:
    folder = write_peft(tmp_path / "half", random_pairs(engine.config, 1), engine.config.head_dim)
    weights = folder / "adapter_model.safetensors"
    raw = weights.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    del header["base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"]
    head = json.dumps(header).encode()
    weights.write_bytes(len(head).to_bytes(8, "little") + head + raw[8 + length :])
    with pytest.raises(NotsoError, match="layer 0, up_proj: A or B is missing"):
        add(engine, "half", folder)
