"""No word that docs/glossary.md replaces is left where it says so."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GLOSSARY = ROOT / "docs" / "glossary.md"
PROSE = {".py", ".h", ".cpp", ".html", ".js", ".css", ".md"}

# Words that stay, each in one file, because they are not ours to choose.
EXCEPTIONS = {
    ("src/notso/smollm3/diagnostics/peers/worker.py", "prefix cache"): "another engine's, by its own name",
    ("src/notso/smollm3/conversion/hf_folder.py", "attn_norm"): "a tensor's name in a GGUF file",
    ("src/notso/smollm3/conversion/hf_folder.py", "ffn_norm"): "a tensor's name in a GGUF file",
    ("src/notso/smollm3/diagnostics/synth.py", "attn_norm"): "a tensor's name in a GGUF file",
    ("src/notso/smollm3/diagnostics/synth.py", "ffn_norm"): "a tensor's name in a GGUF file",
    ("src/notso/smollm3/engine/adapters.py", "rank"): "of a low-rank adapter",
    ("src/notso/smollm3/model/adapter_file.py", "rank"): "of a low-rank adapter",
    ("src/notso/smollm3/model/input_batch.py", "rank"): "of a low-rank adapter",
    ("src/notso/smollm3/model/lora.py", "rank"): "of a low-rank adapter",
    ("src/notso/smollm3/model/transformer.py", "rank"): "of a low-rank adapter",
    ("src/notso/smollm3/values/adapter.py", "rank"): "of a low-rank adapter",
    **{
        (f"src/notso/{file}", "rank"): "of a low-rank adapter"
        for file in ("cli/tune.py", "smollm3/tuning/recipe.py", "smollm3/tuning/trainer.py")
    },
    ("src/notso/web/api/server/models.py", "rank"): "of a low-rank adapter",
    ("src/notso/smollm3/model/weights.py", "attn_norm"): "a tensor's name in a GGUF file",
    ("src/notso/smollm3/model/weights.py", "ffn_norm"): "a tensor's name in a GGUF file",
}

STRINGS = r"\"\"\".*?\"\"\"|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'"
QUOTED = {".py": re.compile(rf"{STRINGS}|#[^\n]*", re.DOTALL), ".h": re.compile(rf"{STRINGS}|//[^\n]*", re.DOTALL)}
QUOTED[".cpp"] = QUOTED[".h"]

Entry = tuple[str, str, bool]  # folder it counts in ("" everywhere), word, whether it is a part of names


def entries() -> list[Entry]:
    found = []
    for section in GLOSSARY.read_text("utf-8").split("\n## ")[1:]:
        folder = match[1] if (match := re.match(r"In `([\w/]+)`", section)) else ""
        for row in re.findall(r"^\| (?!say |-)(.+) \|$", section, re.MULTILINE):
            avoided = row.split(" | ")[-1]
            found += [(folder, word, True) for word in re.findall(r"`(\w+)`", avoided)]
            found += [(folder, word, False) for word in re.findall(r'"([\w ]+)"', avoided)]
    return found


def parts(name: str) -> str:
    """A name's words in lower case: `StepLatency` and `STEP_LATENCY` are ` step latency `."""
    return f" {' '.join(re.findall(r'[A-Z]?[a-z]+|[A-Z]+(?![a-z])', name)).lower()} "


def names(path: Path, text: str) -> set[str]:
    """The file's own name, and if it is Python or C++ every identifier outside of comments and strings."""
    quoted = QUOTED.get(path.suffix)
    return {path.stem, *(re.findall(r"[A-Za-z_]\w*", quoted.sub(" ", text)) if quoted else ())}


@cache
def sources() -> dict[str, tuple[str, str]]:
    """By file: its names, each as words, in one line; and its text in lower case, words apart by one space."""
    files = [p for folder in ("src", "native", "docs") for p in (ROOT / folder).rglob("*") if p.suffix in PROSE]
    return {
        str(path.relative_to(ROOT)): prepared(path, path.read_text("utf-8"))
        for path in files
        if "vendor" not in path.parts and path != GLOSSARY
    }


def prepared(path: Path, text: str) -> tuple[str, str]:
    found = sorted(names(path, text))
    return "|".join(["", *found, *map(parts, found), ""]), re.sub(r"[\s#/*>]+", " ", text.lower())


def left(files: dict[str, tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """(file, word) of every word that should be another. A word with a capital is a whole name, others are parts."""
    for folder, word, is_name in entries():
        name, term = f"|{word}|" if word[0].isupper() else parts(word), re.compile(rf"\b{word}\b")
        for file, (named, text) in files.items():
            if file.startswith(folder) and (name in named if is_name else word in text and term.search(text)):
                yield file, word


def test_the_glossary_is_read() -> None:
    kinds = {(folder, is_name) for folder, _, is_name in entries()}
    assert len(entries()) > 70 and len(sources()) > 400
    assert kinds == {("", True), ("", False), ("src/notso/smollm3", True), ("native", True)}


def test_no_word_is_left_that_the_glossary_replaces() -> None:
    wrong = set(left(sources()))
    assert not sorted(wrong - set(EXCEPTIONS))
    assert not set(EXCEPTIONS) - wrong, "exceptions that nothing needs"


@pytest.mark.parametrize(
    ("file", "text", "word"),
    [
        ("src/notso/web/turns/turn.py", "class JobQueue: pass", "job"),
        ("src/notso/smollm3/kv/offload.py", "self.restore_block(1)", "restore"),
        ("src/notso/smollm3/model/step.py", "def f(READ_AHEAD=1): pass", "read_ahead"),
        ("src/notso/web/app.py", "# put back on\n# the   shelf\n", "shelf"),
        ("native/ops/rows.h", "int kPanel = 3;  // fine", "panel"),
        ("docs/chat.md", "A recorded\nprogram is replayed.", "recorded program"),
    ],
)
def test_a_planted_word_is_found(file: str, text: str, word: str) -> None:
    assert (file, word) in set(left({file: prepared(Path(file), text)}))


def test_other_words_are_let_through() -> None:
    """Parts of longer words, and words that are wrong elsewhere only."""
    text = "# rankings, scapes, slots\nclass Ranking: restorer = slots = gaps = 1\n"
    assert not set(left({"src/notso/smollm3/x.py": prepared(Path("x.py"), text)}))
    assert not set(left({"src/notso/web/x.py": prepared(Path("x.py"), "slot = restore = panel = 1")}))
