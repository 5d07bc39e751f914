"""`make test` omits only test files that no change affects."""

from __future__ import annotations

import subprocess
from pathlib import Path

import due_files
import long_tests
import pytest

TREE = {
    "src/notso/web/__init__.py": "",
    "src/notso/web/page.py": "from notso.web import (\n    words,\n)\n",
    "src/notso/web/words.py": "",
    "src/notso/web/app.py": "from notso.web import page\n",
    "src/notso/web/api/routes.py": "",
    "src/notso/web/static/page.css": "",
    "src/notso/cli/run.py": "from notso.web import words\n",
    "src/notso/qtensor/__init__.py": "",
    "native/sum.cpp": "",
    "docs/chat.md": "",
    "tests/conftest.py": "",
    "tests/shared.py": "from notso.web.page import show\n",
    "tests/pages/conftest.py": "from shared import it\n\n@pytest.fixture\ndef server():\n    return it\n",
    "tests/pages/kept.npz": "",
    "tests/pages/test_served.py": "def test_it(server):\n    assert server\n",
    "tests/pages/test_alone.py": "from long_tests import LONG\n\nPATHS = 'kept.npz', 'src', 'tests'\n",
    "tests/long_tests.py": "LONG = {'page': ('src/notso/web',)}\n",
    "tests/web/api/test_routes.py": "from notso.web.app import create_app\n",
    "tests/web/test_words.py": "",
    "tests/cli/test_run.py": "",
    "tests/test_sum.py": "CODE = 'import notso.qtensor'\n",
    "tests/test_docs.py": "PAGE = ROOT / 'docs' / 'chat.md'\n",
    "tests/architecture/test_walls.py": "",
}
ALWAYS = "tests/architecture/test_walls.py"
UNSERVED = {ALWAYS, "tests/pages/test_alone.py", "tests/test_sum.py", "tests/test_docs.py"}


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a small repository in which all tests have passed."""
    for name, value in (("ROOT", tmp_path), *((each, tmp_path / each) for each in ("PASSED", "PLANNED", "SECONDS"))):
        monkeypatch.setattr(due_files, name, value)
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setattr(due_files, "DRAWN_OF", 10**9)  # a single file is drawn
    due_files.write(due_files.PLANNED, digests())
    due_files.record(dict.fromkeys(due_files.read(due_files.PLANNED), 1.0), set())
    yield tmp_path
    forget()


def forget() -> None:
    for each in vars(due_files).values():
        if hasattr(each, "cache_clear"):
            each.cache_clear()


def digests() -> dict[str, str]:
    forget()
    return due_files.digests()


def changed() -> set[str]:
    """Return the test files whose digest differs from the recorded one."""
    passed = due_files.read(due_files.PASSED)
    return {name for name, digest in digests().items() if passed.get(name) != digest}


@pytest.mark.parametrize(
    ("name", "due"),
    [
        (
            "src/notso/web/words.py",
            {"tests/pages/test_served.py", "tests/web/test_words.py", "tests/cli/test_run.py"},
        ),  # due to a fixture, a helper, two imports, the location and the module's name; app.py does not import it
        ("src/notso/web/app.py", {"tests/web/api/test_routes.py", "tests/web/test_words.py"}),
        ("src/notso/web/api/routes.py", {"tests/web/api/test_routes.py"}),  # due to its location
        ("src/notso/web/static/page.css", {name for name in TREE if "/test_" in name} - UNSERVED),
        ("tests/pages/conftest.py", {"tests/pages/test_served.py"}),
        ("tests/pages/kept.npz", {"tests/pages/test_alone.py"}),
        ("tests/pages/test_alone.py", {"tests/pages/test_alone.py"}),
        ("native/sum.cpp", {"tests/test_sum.py"}),
        ("docs/chat.md", {"tests/test_docs.py"}),
        ("tests/conftest.py", {name for name in TREE if "/test_" in name}),
    ],
)
def test_change_makes_dependent_test_files_due(tree: Path, name: str, due: set[str]) -> None:
    assert changed() == set()
    (tree / name).write_text(TREE[name] + "\n")
    assert changed() == due


def test_due_files_include_required_drawn_and_new_files(tree: Path) -> None:
    now, passed = digests(), due_files.read(due_files.PASSED)
    assert due_files.due(now, {}) == [], "a fresh clone runs everything"
    chosen = due_files.due(now, passed)
    assert len(chosen) == 2 and ALWAYS in chosen, "one due file and one drawn file"
    assert "tests/test_new.py" in due_files.due(now | {"tests/test_new.py": "0"}, passed)


def test_only_failed_test_files_are_due_again(tree: Path) -> None:
    due_files.record({"tests/test_sum.py": 1.0, "tests/test_docs.py": 1.0}, {"tests/test_sum.py"})
    assert changed() == {"tests/test_sum.py"}


def test_file_changed_during_the_run_is_due_again(tree: Path) -> None:
    """Recorded digests are those from before the run."""
    (tree / "docs/chat.md").write_text("Changed.")
    due_files.record({"tests/test_docs.py": 1.0}, set())
    assert changed() == {"tests/test_docs.py"}


def test_default_cases_of_thinned_tests_are_spread_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_tests, "THINNED", {"engine": {"a.py": {"test_many": 2, "test_one": 0}}})
    cases = ["a.py::test_one", *(f"a.py::test_many[{at}]" for at in range(4)), "a.py::test_other"]
    assert long_tests.thinned(cases) == dict.fromkeys(
        ("a.py::test_one", "a.py::test_many[1]", "a.py::test_many[3]"), "engine"
    )


def test_long_cases_do_not_count_as_default_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, no case of a test would run if those chosen for it were marked as long."""
    monkeypatch.setattr(long_tests, "THINNED", {"engine": {"a.py": {"test_many": 1}}})
    cases = [f"a.py::test_many[{at}]" for at in range(3)]
    assert long_tests.thinned(cases, marked=cases[:1]) == {"a.py::test_many[2]": "engine"}


def test_every_thinned_test_exists_and_belongs_to_the_files_of_its_group() -> None:
    for group, files in long_tests.THINNED.items():
        for file, tests in files.items():
            assert any(file == each or file.startswith(f"{each}/") for each in long_tests.GROUPS[group]), file
            source = (long_tests.ROOT / file).read_text("utf-8")
            assert not [test for test in tests if f"\ndef {test}(" not in source], file


def test_comments_and_docstrings_make_no_long_tests_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = """def f():
    \"\"\"Return # nothing.\"\"\"
    # why
    return "#", '\\'#', 1  # how
"""
    monkeypatch.setattr(long_tests, "ROOT", tmp_path)
    (tmp_path / "src/notso/cli").mkdir(parents=True)
    digests = {}
    for name, text in {
        "before": before,
        "comment": before.replace("# why\n    ", "").replace("# how", "# otherwise"),
        "docstring": before.replace("Return # nothing.", "Return\n\n    nothing."),
        "blank": "\n" + before.replace("    # why", "\n    # why\n"),
        "string": before.replace('"#"', '"# "'),
        "number": before.replace("1", "2"),
    }.items():
        (tmp_path / "src/notso/cli/a.py").write_text(text)
        long_tests.content.cache_clear()
        digests[name] = [long_tests.digest(group) for group in ("chaos", "commands")]
    long_tests.content.cache_clear()
    code, text = zip(*digests.values(), strict=True)
    assert code[0] == code[1] == code[2] == code[3] and len({*code}) == 3 and len({*text}) == 6
