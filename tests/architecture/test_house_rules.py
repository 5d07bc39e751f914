"""Project-wide rules: banned words, names, docstrings, pinned versions, and no machine-specific paths."""

from __future__ import annotations

import ast
import inspect
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from architecture.syntax import tree

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "notso"


def tracked() -> list[Path]:
    """Return all files of the repository, even if git or the .git folder is missing."""
    if shutil.which("git") and (ROOT / ".git").exists():
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, timeout=60).stdout
        files = [ROOT / name for name in listed.decode().split("\0") if name]
    else:
        skipped = {".venv", "build", "dist", "__pycache__", "artifacts", ".hypothesis"}
        files = [p for p in ROOT.rglob("*") if not skipped & set(p.relative_to(ROOT).parts)]
    return [path for path in files if path.is_file()]


FILES = tracked()
PYTHON = [path for path in FILES if path.suffix == ".py"]
NATIVE = [path for path in FILES if path.suffix in (".cpp", ".h") and ROOT / "native" in path.parents]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def text(path: Path) -> str | None:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError:
        return None  # images and models


def test_source_files_are_collected() -> None:
    assert len(PYTHON) > 50 and len(NATIVE) > 10


def test_qtensor_and_native_code_do_not_mention_the_model() -> None:
    word = re.compile(r"smol|llama|chat|think|token|prompt|vocab", re.IGNORECASE)
    below = [p for p in PYTHON if SOURCE / "qtensor" in p.parents] + NATIVE
    wrong = [
        f"{named(path)}:{number}: {line.strip()}"
        for path in below
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if word.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def test_cancellations_are_not_lost() -> None:
    """Up to Python 3.11, `asyncio.wait_for` ignores a cancellation that arrives together with the result."""
    wrong = [
        named(path) for path in PYTHON if SOURCE in path.parents and "asyncio.wait_for(" in path.read_text("utf-8")
    ]
    assert not wrong, f"use asyncio.timeout: {wrong}"


def test_file_and_folder_names_are_not_vague() -> None:
    vague = {
        "util",
        "utils",
        "helper",
        "helpers",
        "common",
        "misc",
        "manager",
        "managers",
        "base_utils",
        "tools_common",
    }
    assert not [named(path) for path in FILES if path.stem in vague or set(path.relative_to(ROOT).parts[:-1]) & vague]


def test_every_python_file_has_a_docstring() -> None:
    docstring = re.compile(r'(?:#.*\n|\n)*r?"""\s*[^\s"]')
    assert not [named(p) for p in PYTHON if (source := p.read_text("utf-8").strip()) and not docstring.match(source)]


def test_every_native_file_or_its_header_begins_with_a_comment() -> None:
    """Its first line is a comment, or its header's first line is."""
    quiet = [path for path in NATIVE if not path.read_text("utf-8").startswith("//")]
    assert not [named(p) for p in quiet if p.suffix == ".h"]
    assert not [named(p) for p in quiet if p.suffix == ".cpp" and not p.with_suffix(".h").exists()]


@pytest.mark.parametrize("floor", ["qtensor", "smollm3"])
def test_public_functions_and_classes_have_docstrings(floor: str) -> None:
    wrong = [
        f"{named(path)}: {node.name}"
        for path in PYTHON
        if SOURCE / floor in path.parents
        for node in tree(path).body
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
    assert not wrong


def test_exported_names_exist_and_classes_have_docstrings() -> None:
    import notso
    from notso import smollm3

    for module in (notso, smollm3):
        assert len(set(module.__all__)) == len(module.__all__)
        for name in module.__all__:
            assert getattr(module, name) is not None
    assert {"Engine", "SamplingParams", "Message"} <= set(notso.__all__)
    things = [value for name in smollm3.__all__ if inspect.isclass(value := getattr(smollm3, name))]
    assert len(things) > 10 and not [thing.__name__ for thing in things if not thing.__doc__]
    with pytest.raises(AttributeError):
        _ = notso.nothing_of_that_name  # type: ignore[attr-defined]


def test_public_signatures_are_stable() -> None:
    """Names, order and defaults of parameters that users' programs depend on."""
    from notso import Engine, Message, SamplingParams

    def parameters(function: object) -> dict[str, object]:
        return {name: p.default for name, p in inspect.signature(function).parameters.items() if name != "self"}  # type: ignore[arg-type]

    for method in (Engine.render, Engine.encode_chat, Engine.count_tokens, Engine.estimate):
        assert list(parameters(method).items())[1] == ("options", None)
    for method in (Engine.submit, Engine.generate, Engine.speculative_prefill):
        assert list(parameters(method))[:3] == ["messages", "params", "options"]
    assert next(iter(parameters(Engine.load).values())) is None, "without a path, the demo model is loaded"
    assert list(parameters(Engine.logits)) == ["ids", "adapter"]
    assert [*parameters(Message)][:2] == ["role", "content"]
    assert {"temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "stop", "logit_bias"} <= set(
        parameters(SamplingParams)
    )


def test_files_contain_no_machine_specific_paths() -> None:
    """No file contains machine-specific paths or package indexes, which each machine configures."""
    taboo = re.compile(
        r"/w[o]rk/|/r[o]ot/|/h[o]me/(?!me\b)\w|/Us[e]rs/\w|/o[p]t/|py[p]i\.org|python[h]osted|index-[u]rl|find-[l]inks"
    )
    here = Path(__file__).resolve().parent  # this folder's tests contain the forbidden words
    wrong = []
    for path in FILES:
        content = text(path) if path.resolve().parent != here else None
        wrong += [named(path)] if content and taboo.search(content) else []
    assert not wrong


def test_versions_are_pinned_exactly() -> None:
    pins = [line for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines() if line and line[0] != "#"]
    assert len(pins) > 30 and not [pin for pin in pins if not re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9A-Za-z.]*", pin)]


def test_every_dependency_is_pinned() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    lines = project["project"]["dependencies"] + project["project"]["optional-dependencies"]["dev"]
    lines += project["build-system"]["requires"]

    def name_of(line: str) -> str:
        return re.split(r"[<>=!~\[; ]", line)[0].replace("_", "-").replace(".", "-").lower()

    pinned = {name_of(line) for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines()}
    assert not [line for line in lines if name_of(line) not in pinned]


def test_dependencies_with_known_vulnerabilities_are_excluded() -> None:
    """pip keeps an installed version that satisfies the requirement."""
    import tomllib

    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    lowest = dict(line.split(">=") for line in dependencies if ">=" in line)
    # In this order: CVE-2025-62727 and CVE-2026-48710; events split at U+2028; CVE-2025-27516; CVE-2025-43859
    fixed = {"starlette": "1.0.1", "fastapi": "0.165", "jinja2": "3.1.6", "h11": "0.16"}
    numbers = {name: [int(part) for part in lowest.get(name, "0").split(".")] for name in fixed}
    assert not [name for name, version in fixed.items() if numbers[name] < [int(part) for part in version.split(".")]]


def test_every_skip_and_xfail_has_a_reason() -> None:
    """Skips print their reason: pytest runs with -ra, and each skip and xfail has a reason."""
    assert "-ra" in (ROOT / "pyproject.toml").read_text("utf-8")
    bare = re.compile(r"pytest\.mark\.(skip\b(?!\()|skip\(\)|xfail\b(?!\(reason))|pytest\.skip\(\)|pytest\.xfail\(\)")
    tests = [path for path in PYTHON if ROOT / "tests" in path.parents and path.resolve() != Path(__file__).resolve()]
    assert not [named(path) for path in tests if bare.search(path.read_text("utf-8"))]
