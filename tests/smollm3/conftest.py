"""Tokenizers (a small one trained here, and the official one if its file exists) and models (random weights, and the
demo) for tests of this layer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from golden.dequantized import write_dequantized
from golden.random_models import RANDOM
from smollm3.kv.block_folder import Open, opening
from tokenizers import decoders, models, pre_tokenizers, trainers

from notso.qtensor.backends.cpu import kernel_choice
from notso.smollm3 import Engine
from notso.smollm3.hub.registry import demo_path
from notso.smollm3.scheduling.ngram_drafter import StepLatency
from notso.smollm3.text.tokenizer import Tokenizer
from notso.smollm3.text.tokenizer_pipeline import LLAMA_3

ROOT = Path(__file__).parents[2]
OFFICIAL_DATA = ROOT.parent / "shared" / "data"

CONTROL_TEXTS = ("<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>")
USER_DEFINED_TEXTS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<code>", "</code>")


def official_file(name: str) -> Path:
    """Return a file of the official tokenizer or templates; skip the test if it does not exist."""
    path = OFFICIAL_DATA / name
    if not path.is_file():
        pytest.skip(f"the official {name} is not in ../shared/data")
    return path


def metadata_of(tokenizer_json: dict[str, Any], control: set[str], eos: str = "<|im_end|>") -> dict[str, Any]:
    """Return a GGUF file's metadata for the tokenizer of a tokenizer.json."""
    added = {token["content"]: token["id"] for token in tokenizer_json["added_tokens"]}
    ids = {**tokenizer_json["model"]["vocab"], **added}
    tokens = sorted(ids, key=lambda text: ids[text])
    assert [ids[text] for text in tokens] == list(range(len(tokens)))
    merges = tokenizer_json["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smaug-bpe",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1 if text not in added else 3 if text in control else 4 for text in tokens],
        "tokenizer.ggml.merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in merges],
        "tokenizer.ggml.eos_token_id": ids[eos],
    }


def _trained() -> tokenizers.Tokenizer:
    """Train a small byte-level BPE tokenizer like SmolLM3's, but with the special tokens before the ordinary ones."""
    encoder = tokenizers.Tokenizer(models.BPE(ignore_merges=True))
    encoder.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(LLAMA_3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    encoder.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1200,
        special_tokens=[*CONTROL_TEXTS, *USER_DEFINED_TEXTS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = [path.read_text() for path in sorted((ROOT / "src/notso/smollm3").glob("*.py"))]
    encoder.train_from_iterator([*text, "Grüße, žluťoučký kůň, привет, 你好世界, مرحبا, 👩‍👩‍👧 🎉 " * 20], trainer)
    return encoder


@pytest.fixture(scope="session")
def small_json() -> dict[str, Any]:
    """Return the small tokenizer as a tokenizer.json."""
    data: dict[str, Any] = json.loads(_trained().to_str())
    return data


@pytest.fixture(scope="session")
def small_oracle(small_json: dict[str, Any]) -> tokenizers.Tokenizer:
    """Return the tokenizers library's tokenizer for `small_json`, which recognizes special tokens in text."""
    return tokenizers.Tokenizer.from_str(json.dumps(small_json))


@pytest.fixture(scope="session")
def small_metadata(small_json: dict[str, Any]) -> dict[str, Any]:
    """Return the small tokenizer as in a GGUF file. Copy it for changes."""
    return metadata_of(small_json, set(CONTROL_TEXTS))


@pytest.fixture(scope="session")
def small_tokenizer(small_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(small_metadata)


@pytest.fixture(scope="session")
def official_metadata() -> dict[str, Any]:
    """Return the official tokenizer as in the official GGUF files; skip the test if its file does not exist."""
    data = json.loads(official_file("tokenizer.json").read_bytes())
    control = {token["content"] for token in data["added_tokens"] if token["special"]}
    return metadata_of(data, control)


@pytest.fixture(scope="session")
def official_tokenizer(official_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(official_metadata)


@pytest.fixture(scope="session")
def official_oracle() -> tokenizers.Tokenizer:
    """Return the tokenizers library's tokenizer for the official tokenizer.json."""
    return tokenizers.Tokenizer.from_file(str(official_file("tokenizer.json")))


@pytest.fixture(
    scope="session", params=["demo", "official of Hugging Face", "official of ggml-org"], ids=["demo", "hf", "gguf"]
)
def template_source(request: pytest.FixtureRequest) -> str:
    """Return each known chat template; the official ones if their files exist."""
    if request.param == "demo":
        return (ROOT / "training/chat_template.jinja").read_text()
    hf = "Hugging" in request.param
    return official_file("chat_template.jinja" if hf else "chat_template.ggml-org-gguf.jinja").read_text()


# ---------------------------------------------------------------- models


@pytest.fixture(scope="session")
def random_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model with eight layers of random weights in F32 (`golden.random_models`)."""
    return RANDOM.write(tmp_path_factory.mktemp("random") / "random.gguf")


@pytest.fixture(scope="session")
def demo_f32_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the demo model with all tensors dequantized."""
    return write_dequantized(demo_path(), tmp_path_factory.mktemp("demo") / "demo-f32.gguf")


@pytest.fixture(scope="session")
def random_engine(random_file: Path) -> Iterator[Engine]:
    with Engine.load(random_file, kv="f16") as engine:
        yield engine


@pytest.fixture(scope="session")
def demo_engine() -> Iterator[Engine]:
    """Load the demo model as shipped."""
    with Engine.load() as engine:
        yield engine


@pytest.fixture(scope="session")
def demo_f32_engine(demo_f32_file: Path) -> Iterator[Engine]:
    with Engine.load(demo_f32_file, kv="f16") as engine:
        yield engine


@pytest.fixture
def own_kernels() -> Iterator[None]:
    """Restore kernels and threads after a test that changes them."""
    kernels, threads = kernel_choice.kernels(), kernel_choice.threads()
    yield
    kernel_choice.use_kernels(kernels)
    kernel_choice.set_threads(threads)


@pytest.fixture
def free_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the cost of draft rows to zero. The engine measures this cost, so on a busy machine it might propose no
    drafts, which a test requires."""
    monkeypatch.setattr(StepLatency, "relative_cost", lambda self, rows, more: 1.0)


@pytest.fixture(scope="session")
def demo_f16_engine() -> Iterator[Engine]:
    """Load the demo model with a half-precision cache, as the peers use."""
    with Engine.load(kv="f16") as engine:
        yield engine


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Return a function that opens a folder of blocks, the same one each time."""
    with opening(tmp_path / "kv") as open_files:
        yield open_files
