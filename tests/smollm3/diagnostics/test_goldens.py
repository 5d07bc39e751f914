"""A model file is compared with transformers' golden logits, and each planted error in a model is detected."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden.random_models import RANDOM, RandomModel
from golden.store import Golden

from notso.qtensor import F32, FORMATS_BY_NAME, Format, GGUFFile, GGUFWriter, QTensor
from notso.smollm3 import Engine, config
from notso.smollm3.diagnostics.goldens import RELEASED, GoldenReport, allowed_error, check_goldens
from notso.smollm3.errors import InvalidRequestError

LONG = pytest.mark.long("engine")
SISTERS = ("Q8_0", "Q6_K", "Q5_K", "Q4_0")
SHAPE = {"layers": RANDOM.layers, "hidden_size": RANDOM.hidden, "vocab_size": RANDOM.vocab}


@pytest.fixture(scope="module")
def goldens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return transformers' results for the random model (tests/golden/random_f32.npz) in the format of a golden set."""
    kept = Golden.load("random_f32")
    cases: list[dict[str, Any]] = []
    for ids, prompt, start in zip(kept.lists, kept.prompt_lengths.tolist(), kept.starts, strict=True):
        case: dict[str, Any] = {"ids": ids[:prompt], "continuation": ids[prompt:]}
        case["logits"] = [
            {"position": int(row) - start, "values": [float(each) for each in logits]}
            for row, logits in zip(kept.rows, kept.logits, strict=True)
            if start <= row < start + prompt
        ]
        cases.append(case)
    path = tmp_path_factory.mktemp("goldens") / "random.json"
    path.write_text(json.dumps({"name": "random", "source": kept.source, "shape": SHAPE, "cases": cases}))
    return path


def written(path: Path, change: Callable[[str, Any], Any] = lambda name, values: values, **settings: Any) -> Path:
    """Write the random model with changed settings or weights."""

    class Changed(RandomModel):
        def weights(self) -> Any:
            return ((name, change(name, values)) for name, values in super().weights())

    return Changed(**settings).write(path)


def in_format(source: Path, path: Path, format: Format) -> Path:
    """Write a copy of a file with its matrices in another format."""
    with GGUFFile.open(source) as file, GGUFWriter(path, durable=False) as writer:
        for key, value in file.metadata.items():
            writer.add(key, value, file.metadata_types[key])
        for tensor in file.tensors.values():
            made = QTensor.quantize(tensor.dequantize(), format if len(tensor.shape) == 2 else F32)
            writer.add_tensor(tensor.name, tensor.shape, made.format, made.data)
    return path


def half_split(name: str, values: Any) -> Any:
    """Return rows of q and k in Hugging Face's order, which a converter must change."""
    if ".attn_q." not in name and ".attn_k." not in name:
        return values
    heads = values.reshape(-1, RANDOM.head_dim // 2, 2, values.shape[-1])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(values.shape)


def failed(report: GoldenReport) -> set[str]:
    return {"tokens" if "greedy" in check.what else "logits" for check in report.checks if not check.ok}


def test_correct_weights_pass_the_golden_check(goldens: Path, tmp_path: Path) -> None:
    report = check_goldens(written(tmp_path / "right.gguf"), goldens)
    assert report.ok and report.bits == 32 and "transformers" in report.source
    assert len(report.checks) > 20 and max(check.found for check in report.checks) < 0.002


@pytest.mark.parametrize(
    "planted",
    [{"change": half_split}, {"theta": 1e4}, {"eps": 1e-5}, {"tied": False}],
    ids=["q and k permuted", "rope base", "norm epsilon", "untied head"],
)
def test_planted_model_error_is_detected(planted: dict[str, Any], goldens: Path, tmp_path: Path) -> None:
    assert failed(check_goldens(written(tmp_path / "wrong.gguf", **planted), goldens)) >= {"logits"}


@pytest.mark.parametrize("interval", [pytest.param(3, marks=LONG), 5, pytest.param(10_000, marks=LONG)])
def test_wrong_no_rope_interval_is_detected(
    interval: int, goldens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "NO_ROPE_LAYER_INTERVAL", interval)
    assert failed(check_goldens(written(tmp_path / "right.gguf"), goldens)) == {"logits", "tokens"}


WIDE = {"hidden": 512, "ffn": 768, "heads": 8, "kv_heads": 2, "head_dim": 64, "vocab": 2048}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Write a model whose rows can be quantized, in F32, and its golden set."""
    folder = tmp_path_factory.mktemp("wide")
    path = written(folder / "f32.gguf", **WIDE)
    cases = []
    with Engine.load(path, kv="f16", context_tokens=256) as engine:
        for seed in range(4):
            ids = np.random.default_rng(seed).integers(0, WIDE["vocab"], 24).tolist()
            logits = engine.logits(ids)
            runs = [{"position": at, "values": logits[at].tolist()} for at in (0, 9, 23)]
            cases.append({"ids": ids, "means": logits.mean(axis=1).tolist(), "logits": runs})
    shape = {"layers": RANDOM.layers, "hidden_size": WIDE["hidden"], "vocab_size": WIDE["vocab"]}
    (folder / "wide.json").write_text(json.dumps({"shape": shape, "cases": cases}))
    return path, folder / "wide.json"


@pytest.mark.parametrize("name", ["BF16", "Q4_K", *(pytest.param(name, marks=LONG) for name in SISTERS)])
def test_quantization_error_passes_but_planted_error_fails(name: str, wide: tuple[Path, Path], tmp_path: Path) -> None:
    source, goldens = wide
    format = FORMATS_BY_NAME[name]
    report = check_goldens(in_format(source, tmp_path / "right.gguf", format), goldens)
    assert report.ok
    assert max(check.found for check in report.checks) > 0.3 * allowed_error(report.bits), (
        "the tolerance must be tight enough"
    )
    wrong = written(tmp_path / "f32.gguf", theta=1e4, **WIDE)
    assert failed(check_goldens(in_format(wrong, tmp_path / "wrong.gguf", format), goldens)) == {"logits"}


def test_released_golden_set_is_complete_and_rejects_other_models(tmp_path: Path) -> None:
    given = json.loads(RELEASED.read_text())
    assert given["shape"] == {"layers": 36, "hidden_size": 2048, "vocab_size": 128256}
    assert [sorted(each) for each in given["cases"]] == [["ids", "logits", "means"], ["continuation", "text"]]
    with pytest.raises(InvalidRequestError, match="belong to another model: layers is 36, not 8"):
        check_goldens(written(tmp_path / "random.gguf"))


def test_constant_golden_logits_fail_the_check(tmp_path: Path) -> None:
    case = {"ids": [1], "logits": [{"position": 0, "values": [3.0] * 8}]}
    (tmp_path / "flat.json").write_text(json.dumps({"shape": SHAPE, "cases": [case]}))
    (check,) = check_goldens(written(tmp_path / "random.gguf"), tmp_path / "flat.json").checks
    assert not check.ok


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "an object|JSON object"),
        ("{", "not JSON"),
        ("{}", "must specify the shape of their model"),
        (json.dumps({"shape": SHAPE}), "no case has means, logits or a continuation to compare"),
        (json.dumps({"shape": SHAPE, "cases": 3}), "must be a list"),
        (json.dumps({"shape": SHAPE, "cases": [{"ids": [1], "text": "a"}]}), "either ids or text"),
        (json.dumps({"shape": SHAPE, "cases": [{"ids": [99999]}]}), "ids of this vocabulary"),
        (json.dumps({"shape": SHAPE, "cases": [{"ids": [1], "means": [1, 2]}]}), "more means than ids"),
        (json.dumps({"shape": SHAPE, "cases": [{"ids": [1] * 1025}]}), "too many"),
        (
            json.dumps({"shape": SHAPE, "cases": [{"ids": [1], "logits": [{"position": 1, "values": [1, 2]}]}]}),
            "no log",
        ),
        (json.dumps({"shape": SHAPE, "cases": [{"ids": [1], "logits": [{"position": 0, "values": [1]}]}]}), "several"),
        ('{"shape": {"layers": NaN}}', "not JSON"),
        (json.dumps({"shape": SHAPE, "cases": [{"ids": [1], "means": [10**400]}]}), "lists of numbers"),
    ],
)
def test_malformed_golden_sets_are_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(text)
    model = written(tmp_path / "random.gguf")
    with pytest.raises(InvalidRequestError, match=words) as error:
        check_goldens(model, tmp_path / "bad.json")
    assert "\n" not in str(error.value)
    with pytest.raises(InvalidRequestError, match="No such file"):
        check_goldens(model, tmp_path / "absent.json")


def test_goldens_must_be_a_regular_file() -> None:
    with pytest.raises(InvalidRequestError, match="regular"):
        check_goldens("demo", Path("/dev/null"))  # a pipe or /dev/zero would never end
