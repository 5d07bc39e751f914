"""The documents are correct: links, commands, targets, options, variables, files, routes and errors exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from routes import with_table

from notso.cli.app import VERBS, app

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(p for f in ("docs", "training", "benchmarks") for p in (ROOT / f).rglob("*.md"))]
)
README_LINES = 120
ARCHITECTURE_LINES = 180

LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
MADE_PATHS = ("build/", "artifacts/", "dist/")


def read(path: Path) -> str:
    return path.read_text("utf-8")


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def everything() -> str:
    return "\n".join(map(read, DOCUMENTS))


def code(text: str) -> Iterator[str]:
    """Yield lines of fenced shell blocks, and code spans outside of blocks."""
    for language, body in FENCE.findall(text):
        if language in ("sh", "bash"):
            yield from (line.split("#")[0].strip() for line in body.splitlines())
    yield from SPAN.findall(FENCE.sub("", text))


def commands(program: str) -> Iterator[tuple[str, list[str]]]:
    """Yield (document, words after the program) for each call of `program` in the documents."""
    for path in DOCUMENTS:
        for line in code(read(path)):
            words = line.split()
            while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                del words[0]
            if words and words[0].removeprefix(".venv/bin/") == program:
                yield named(path), words[1:]


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):.*##", read(ROOT / "Makefile"), re.MULTILINE))


def heading_anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", read(path)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_expected_documents_are_collected() -> None:
    names = {named(path) for path in DOCUMENTS}
    assert {"README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"} <= names
    assert {"docs/commands.md", "docs/kernels/gemv.md", "training/README.md"} <= names


def test_the_readme_is_short() -> None:
    assert len(read(ROOT / "README.md").splitlines()) <= README_LINES


def test_architecture_document_is_short() -> None:
    assert len(read(ROOT / "ARCHITECTURE.md").splitlines()) <= ARCHITECTURE_LINES


def test_planned_changes_name_existing_and_new_files() -> None:
    """In each row of docs/next.md, files to change exist, and files to create do not."""
    rows = re.findall(r"^\| (?!item |-)(.+) \|$", read(ROOT / "docs" / "next.md"), re.MULTILINE)
    assert len(rows) >= 3
    for row in rows:
        name, _, new, changes, _ = row.split(" | ")
        existing = [span for span in SPAN.findall(changes) if "/" in span or "." in span]
        assert existing and all((ROOT / span).exists() for span in existing), name
        made = re.findall(r"\*([\w./]+)\*", new)
        assert made and not [
            path for path in made for base in ("", "src", "src/notso") if (ROOT / base / path).exists()
        ]


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_links_in_documents_resolve(path: Path) -> None:
    wrong = []
    for groups in LINK.findall(FENCE.sub("", read(path))):
        target = "".join(groups)
        file, _, anchor = target.partition("#")
        found = (path.parent / file).resolve() if file else path
        if not found.exists() or (anchor and anchor not in heading_anchors(found)):
            wrong.append(target)
    assert not wrong


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_documents_contain_no_machine_paths_or_hosts(path: Path) -> None:
    text = read(path)
    assert not re.findall(r"(?<![\w.])/(?:home|root|work|tmp|Users|opt|usr|var|mnt)/(?!lib/notso\b)\S*", text)
    assert not re.findall(r"https?://(?!127\.0\.0\.1|localhost)\S+", text)
    assert not re.findall(r"(?i)\b(?:[\w-]+\.)?(?:huggingface\.co|pypi\.org|github\.com|pythonhosted\.org)\b", text)


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_files_named_in_documents_exist(path: Path) -> None:
    """Code spans that look like paths exist, relative to the root, the package, a layer's folder or the document."""
    package = ROOT / "src" / "notso"
    roots = (ROOT, path.parent, package, package / "qtensor", package / "smollm3", package / "web", ROOT / "native")
    wrong = []
    for span in SPAN.findall(FENCE.sub("", read(path))):
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)*/?", span) or not re.search(
            r"/.|\.(py|md|h|cpp|toml|txt|gguf)$|/$", span
        ):
            continue
        if span.startswith((*MADE_PATHS, "ggml-org/", "HuggingFaceTB/")):
            continue
        if span.endswith(".gguf") and "/" not in span:
            continue  # a model file of the user
        if not any((root / span).exists() for root in roots):
            wrong.append(span)
    assert not wrong


def test_files_that_benchmarks_read_exist() -> None:
    places = (ROOT, ROOT / "src" / "notso" / "smollm3", ROOT / "benchmarks")
    names = [
        (path, name)
        for path in sorted((ROOT / "benchmarks").glob("*.py"))
        for name in re.findall(r'"([\w./-]+/[\w.-]+\.(?:py|md))"', read(path))
    ]
    assert names
    for path, name in names:
        assert any((place / name).exists() for place in places), f"{named(path)} reads {name}"


def test_every_make_target_is_documented() -> None:
    shown = set(re.findall(r"make ([a-z-]+)", everything()))
    assert len(targets()) > 8
    assert targets() <= shown, f"not documented: {targets() - shown}"


def test_make_targets_in_documents_exist() -> None:
    wrong = [f"{where}: make {words[0]}" for where, words in commands("make") if words and words[0] not in targets()]
    assert not wrong


def test_every_subcommand_is_documented() -> None:
    page = read(ROOT / "docs" / "commands.md")
    assert not [verb for verb in VERBS if f"## notso {verb}\n" not in page]


def test_notso_commands_in_documents_exist() -> None:
    group: Any = typer.main.get_command(app)
    wrong = []
    shown = list(commands("notso"))
    for where, words in shown:
        if not words or words[0].startswith("-"):
            continue
        verb = group.commands.get(words[0])
        known = (
            {name for parameter in verb.params for name in (*parameter.opts, *parameter.secondary_opts)}
            if verb
            else set()
        )
        options = {word.split("=")[0] for word in words[1:] if word.startswith("-") and len(word) > 1}
        if verb is None or options - known - {"--help", "-h"}:
            wrong.append(f"{where}: notso {' '.join(words)}")
    assert len(shown) > 15 and not wrong


def test_python_programs_in_documents_exist() -> None:
    wrong = []
    for where, words in commands("python"):
        if words[:1] == ["-m"] and not any(
            (base / words[1].replace(".", "/")).with_suffix(".py").is_file() for base in (ROOT, ROOT / "src")
        ):
            wrong.append(f"{where}: {words[1]}")
        if words and words[0].endswith(".py") and not (ROOT / words[0]).is_file():
            wrong.append(f"{where}: {words[0]}")
    assert not wrong


def test_every_environment_variable_is_documented() -> None:
    sources = [*(ROOT / "src").rglob("*.py"), ROOT / "Makefile"]
    read_here = set(re.findall(r"\"(NOTSO_[A-Z_]+[A-Z])\"", "\n".join(map(read, sources))))
    assert len(read_here) > 8
    text = everything()
    assert not [name for name in read_here if name not in text]


def test_architecture_document_lists_every_error_class() -> None:
    tree = read(ROOT / "ARCHITECTURE.md").split("## Errors")[1].split("## ")[0]
    defined = {
        node.name
        for file in ("qtensor/errors", "smollm3/errors", "plugins/errors", "cluster/plan", "web/values/errors")
        for node in ast.parse(read(ROOT / "src" / "notso" / f"{file}.py")).body
        if isinstance(node, ast.ClassDef) and node.name.endswith("Error")
    }
    assert len(defined) > 15
    assert set(re.findall(r"\w+Error\b", tree)) == defined


def test_every_route_is_listed_with_its_audience() -> None:
    assert with_table(read(ROOT / "SECURITY.md")) == read(ROOT / "SECURITY.md"), "run: python supply/routes.py"


def test_kernel_pages_have_required_sections_and_are_indexed() -> None:
    """Each page on kernels contains the plain version, the steps and rejected attempts, and is listed."""
    pages = sorted(path for path in (ROOT / "docs" / "kernels").glob("*.md") if path.name != "README.md")
    index = read(ROOT / "docs" / "kernels" / "README.md")
    assert len(pages) >= 5
    for page in pages:
        text = read(page)
        assert f"({page.name})" in index, page.name
        assert all(f"\n## {part}" in text for part in ("The plain version", "The steps", "Tried and rejected")), (
            page.name
        )


def test_changelog_has_only_known_headings() -> None:
    text = read(ROOT / "CHANGELOG.md")
    areas = {"Model and engine", "Server and APIs", "Chat page", "Command line", "Library", "Operations", "Tuning"}
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    sections = re.findall(r"^## \[(Unreleased|\d+\.\d+\.\d+)\]", text, re.MULTILINE)
    assert sections and len(sections) == len(set(sections))
    assert set(re.findall(r"^### (.+)$", text, re.MULTILINE)) <= areas | kinds
    assert len(sections) > 1 or len(text.splitlines()) <= 120, "a first release lists features, not their history"
