"""Untrusted model files: `verify` and the engine reject them with a one-line message, or they run.

Each file is a small valid one with one to three meaningful changes: keys missing, of the wrong type or out of range;
duplicate, empty, huge or hostile tokens; changed merges, ids, token types and templates; tensors that do not fit.
`CHAOS=long` tries thousands.
"""

from __future__ import annotations

import random
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chaos.ledger import LONG, Ledger

from notso.qtensor.errors import MAX_MESSAGE_CHARACTERS, NotsoError
from notso.qtensor.formats import FORMATS
from notso.qtensor.gguf import GGUFFile
from notso.qtensor.gguf_writer import GGUFWriter
from notso.smollm3 import Engine, Message, SamplingParams
from notso.smollm3.diagnostics.synth import write_synthetic
from notso.smollm3.diagnostics.verification import verify_file
from notso.smollm3.hub.registry import demo_path
from notso.smollm3.text.vocabulary import Vocabulary

FILES = 2000 if LONG else 120
MAX_CPU_SECONDS = 5.0  # per file of a few hundred kilobytes, checked at full length; a hundred times the usual time
HOSTILE = "\n\x1b[2J\r\x00\u202e\u2028\x7f\x9b<|im_end|>" + "é" * 5000
NUMBERS = (0, 1, 2, 3, 15, 255, 256, 257, 10**6, 2**31 - 1)
TEMPLATES = (
    "",
    " ",
    "x",
    "{{ 1 / 0 }}",
    "{% for m in messages %}{{ m.role }}{% endfor %}",
    "{{ messages[0].content }}",
    "{{ messages[-1].content }}",
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
    "{{ raise_exception('no\n\x1b[2J' ~ 'x' * 5000) }}",
    "{% for i in range(10 ** 9) %}{% endfor %}",
    "{{ 'x' * 10 ** 9 }}",
    "{% if %}\n" + HOSTILE,
    "x" * 70_000,
)

Mutation = Callable[[random.Random, dict[str, tuple[Any, str]], dict[str, Any]], None]


def key_gone(rng: random.Random, entries: dict[str, tuple[Any, str]], tensors: dict[str, Any]) -> None:
    del entries[rng.choice(list(entries))]


def another_value(rng: random.Random, entries: dict[str, tuple[Any, str]], tensors: dict[str, Any]) -> None:
    key = rng.choice([key for key, (_, kind) in entries.items() if not kind.startswith("array")])
    entries[key] = rng.choice(
        [
            (rng.choice(NUMBERS), "uint32"),
            (-rng.choice(NUMBERS), "int64"),
            (rng.choice([0.0, -1.0, 1.0, 1e-30, 1e30, float("nan"), float("inf")]), "float32"),
            (rng.choice([1e300, 1e-300]), "float64"),
            (rng.random() < 0.5, "bool"),
            (rng.choice(["", "x", HOSTILE, HOSTILE * 20]), "string"),
            ([HOSTILE] * 3, "array of string"),
            (list(NUMBERS), "array of uint32"),
        ]
    )


def new_key(rng: random.Random, entries: dict[str, tuple[Any, str]], tensors: dict[str, Any]) -> None:
    name = rng.choice(["smollm3.rope.scaling.", "smollm3.", "tokenizer.ggml.", "general."])
    entries[name + rng.choice(["x", "\n\x1b[2J\u202e"])] = rng.choice([(1, "uint32"), (HOSTILE, "string")])


def texts(rng: random.Random, entries: dict[str, tuple[Any, str]], tensors: dict[str, Any]) -> None:
    """Change the tokens: duplicate, empty, huge, hostile, missing, or one too many."""
    tokens = list(entries["tokenizer.ggml.tokens"][0])
    at = rng.randrange(len(tokens))
    match rng.randrange(8):
        case 0:
            tokens[at] = rng.choice(tokens)
        case 1:
            tokens = tokens[: len(tokens) // 2] * 2
        case 2:
            tokens[at] = ""
        case 3:
            tokens[at] = rng.choice(["x", "<", "Ġ"]) * rng.choice([1000, 1024, 1025, 100_000])
        case 4:
            tokens[at] = HOSTILE[: rng.choice([3, 8, 20, 5000])]
        case 5:
            del tokens[at]
        case 6:
            tokens.append(rng.choice(tokens) + "!")
        case 7:
            for i in range(at, min(at + 400, len(tokens))):
                tokens[i] = "<" * (i - at + 1)
    entries["tokenizer.ggml.tokens"] = (tokens, "array of string")


def kinds(rng: random.Random, entries: dict[str, tuple[Any, str]], tensors: dict[str, Any]) -> None:
    found = list(entries["tokenizer.ggml.token_type"][0])
    for at in rng.sample(range(len(found)), rng.choice([1, 50, len(found)])):
        found[at] = rng.choice([1, 2, 3, 4, 5, 3, 4, 0, 6, -1][: rng.choice([7, 10])])
    entries["tokenizer.ggml.token_type"] = (found[: len(found) - (rng.random() < 0.1)], "array of int32")


def merges(rng: random.Random, entries: dict[str, tuple[Any, str]], tensors: dict[str, Any]) -> None:
    found = list(entries["tokenizer.ggml.merges"][0])
    at = rng.randrange(len(found))
    match rng.randrange(6):
        case 0:
            found[at] = rng.choice(["", " ", "nospace", "a b c", HOSTILE, f"{HOSTILE} {HOSTILE}"])
        case 1:
            found = found * rng.choice([2, 20])
        case 2:
            found = [found[at]] * 20_000
        case 3:
            found = []
        case 4:
            rng.shuffle(found)
        case 5:
            found[at] = " ".join(reversed(found[at].split(" ", 1)))
    entries["tokenizer.ggml.merges"] = (found, "array of string")


def template(rng: random.Random, entries: dict[str, tuple[Any, str]], tensors: dict[str, Any]) -> None:
    entries["tokenizer.chat_template"] = (rng.choice(TEMPLATES), "string")


def tensor(rng: random.Random, entries: dict[str, tuple[Any, str]], tensors: dict[str, Any]) -> None:
    """Change one tensor: missing, renamed, of another shape or format, or filled with invalid numbers."""
    name = rng.choice(list(tensors))
    shape, form, data = tensors.pop(name)
    match rng.randrange(5):
        case 0:
            pass
        case 1:
            tensors[rng.choice(["x\n\x1b[2J\u202e", "é" * 30, name + "."])] = (shape, form, data)
        case 2:
            tensors[name] = ((*shape[:-1], shape[-1] * 2), form, data * 2)
        case 3:
            other = rng.choice([each for each in FORMATS.values() if each.block_values <= shape[-1]])
            size = other.block_bytes * shape[-1] // other.block_values
            for side in shape[:-1]:
                size *= side
            tensors[name] = (shape, other, rng.randbytes(size))
        case 4:
            tensors[name] = (shape, form, rng.choice([b"\xff", b"\x00", b"\x7f"]) * len(data))


MUTATIONS: tuple[Mutation, ...] = (key_gone, another_value, new_key, texts, texts, kinds, merges, template, tensor)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, tuple[Any, str]], dict[str, Any]]:
    """Return the metadata entries with their types and the tensors of a valid file."""
    path = tmp_path_factory.mktemp("sound") / "sound.gguf"
    with GGUFFile.open(demo_path()) as demo:
        words = len(demo.metadata["tokenizer.ggml.tokens"])
    write_synthetic(path, layers=1, hidden=256, ffn=256, heads=4, kv_heads=1, vocab=words)
    with GGUFFile.open(path) as file:
        entries = {key: (file.metadata[key], file.metadata_types[key]) for key in file.metadata}
        return entries, {name: (t.shape, t.format, t.data.tobytes()) for name, t in file.tensors.items()}


def write(path: Path, entries: dict[str, tuple[Any, str]], tensors: dict[str, Any]) -> None:
    with GGUFWriter(path, durable=False) as writer:
        for key, (value, kind) in entries.items():
            writer.add(key, value, kind)
        for name, described in tensors.items():
            writer.add_tensor(name, *described)


def check_line(text: str) -> None:
    assert text and text.isprintable() and len(text) <= 10 * MAX_MESSAGE_CHARACTERS, repr(text)[:300]


def verdict(path: Path) -> bool:
    """Return whether `verify` accepts the file."""
    try:
        found = verify_file(path, hash_file=False)
    except NotsoError as error:
        check_line(str(error))
        return False
    for problem in found.problems:
        check_line(problem)
    return found.ok


def runs(path: Path) -> bool:
    """Return whether an engine can load the file; every refusal must be a one-line message."""
    try:
        engine = Engine.load(path, threads=1, max_num_seqs=1)
    except NotsoError as error:
        check_line(str(error))
        return False
    with engine:
        assert engine.info.name.isprintable() and len(engine.info.name) <= 100
        try:
            list(
                engine.generate([Message("user", "Hello <|im_end|> " + "<" * 50)], SamplingParams(max_tokens=2, seed=1))
            )
        except NotsoError as error:
            check_line(str(error))
    return True


def test_mutated_model_files_are_rejected_or_run(sound: Any, tmp_path: Path, own_home: Path, ledger: Ledger) -> None:
    path, failed, ran, slowest = tmp_path / "x\n\x1b[2J.gguf", [], 0, 0.0
    write(path, *sound)
    assert verdict(path) and runs(path)
    before = _peak_bytes()
    for seed in range(FILES):
        rng = random.Random(seed)
        entries, tensors = dict(sound[0]), dict(sound[1])
        try:
            for change in rng.choices(MUTATIONS, k=rng.choice([1, 1, 2, 3])):
                change(rng, entries, tensors)
            write(path, entries, tensors)
        except (KeyError, NotsoError, ValueError, TypeError):
            continue  # the changes cannot be combined
        started = time.process_time()
        try:
            is_sound = verdict(path)
            does_run = runs(path)
            ran += does_run
            assert does_run or not is_sound, "verify accepted a file that does not run"
        except BaseException as error:
            failed.append(f"seed {seed}: {type(error).__name__}: {error}"[:400])
        slowest = max(slowest, time.process_time() - started)
    print(*failed, f"{ran} of {FILES} ran, slowest {slowest:.2f} s", sep="\n", file=sys.stderr)
    assert 0.05 * FILES < ran < 0.8 * FILES, "both outcomes must occur often"
    assert not LONG or slowest < MAX_CPU_SECONDS
    ledger.note(
        "files",
        "model file with modified metadata or tensors hangs, crashes, or is refused without a reason",
        f"{FILES:,} files, with `notso verify` and an engine",
        len(failed),
        {"ran": ran, "slowest CPU ms": 1000 * slowest, "memory rise MB": (_peak_bytes() - before) / 1e6},
    )


def test_duplicate_token_check_runs_in_linear_time(ledger: Ledger) -> None:
    """Count comparisons: each token is looked up once. Comparing all pairs would take hours at full length."""
    count = 999_000 if LONG else 100_000
    tokens = [f"a{i}" for i in range(count)]
    looked_at = 0

    class Counted(str):
        def __eq__(self, other: object) -> bool:
            nonlocal looked_at
            looked_at += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    tokens = [Counted(text) for text in [*tokens, *tokens[-1000:]]]
    started = time.process_time()
    with pytest.raises(NotsoError, match="occurs more than once"):
        Vocabulary(tokens, [1] * len(tokens))
    ledger.note(
        "files",
        "vocabulary with duplicates at its end is compared text by text",
        f"{count:,} texts",
        int(looked_at > 2 * count),
        {"comparisons per text": looked_at / count, "CPU ms": 1000 * (time.process_time() - started)},
    )


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
