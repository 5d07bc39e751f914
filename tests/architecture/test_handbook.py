"""The documentation site contains every document, and its final checks find faults."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from handbook import ROOT, faults, reached

LISTED = re.findall(r"^ +- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)


def test_every_document_and_image_is_reachable_from_the_readme() -> None:
    there = {*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.png")}
    assert len(there) > 60 and there <= reached(ROOT / "README.md")


def test_site_navigation_lists_every_document() -> None:
    assert len(LISTED) > 20 and not [name for name in LISTED if not (ROOT / name).is_file()]
    assert {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} <= set(LISTED)


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ('<a href="other.html#x">a</a> <img src="a%20b.png"> <a href="#y">b</a>', []),
        ('<a href="https://example.org/">elsewhere, when it is clicked</a>', []),
        ('<picture><source srcset="gone.png"></picture>', ["page.html: gone.png is missing"]),
        ('<script src="//example.org/a.js"></script>', ["page.html loads //example.org/a.js"]),
        ('<link href="https://example.org/font.css">', ["page.html loads https://example.org/font.css"]),
    ],
)
def test_missing_files_and_external_resources_are_found(tmp_path: Path, body: str, found: list[str]) -> None:
    for name in ("other.html", "a b.png"):
        (tmp_path / name).touch()
    (tmp_path / "page.html").write_text(body)
    assert list(faults(tmp_path)) == found
