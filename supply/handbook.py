"""Build the documentation site in build/handbook/site: `make docs`.

The site consists of README.md and all files that can be reached from it by links. mkdocs runs in strict mode, so broken
links and anchors are errors. What mkdocs does not check is checked here: that files referenced in HTML exist, and that
no page loads anything from another site.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "handbook"
LINK = re.compile(r"\]\(([^)\s#]+)[^)\s]*\)|(?:src|srcset|href)=\"([^\"#]+)")
LOADED = ("script", "link", "img", "source", "iframe", "video", "audio")


def reached(start: Path) -> set[Path]:
    """Return a document and all files that its links lead to, directly or indirectly."""
    found, left = set(), [start.resolve()]
    while left:
        path = left.pop()
        if path in found or not path.is_file():  # mkdocs reports broken links
            continue
        found.add(path)
        if path.suffix == ".md":
            targets = ["".join(groups) for groups in LINK.findall(path.read_text("utf-8"))]
            left += [(path.parent / target).resolve() for target in targets if "://" not in target]
    return found


class References(HTMLParser):
    """Parser that collects (tag, address) of all references in a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [(tag, value) for name, value in attrs if name in ("src", "srcset", "href") and value]


def faults(site: Path) -> Iterator[str]:
    """Yield missing files and references to other sites."""
    for page in sorted(site.rglob("*.html")):
        if page.name == "404.html":  # its addresses are relative to the server's root
            continue
        for tag, address in References(page.read_text("utf-8")).found:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                if tag in LOADED:
                    yield f"{page.relative_to(site)} loads {address}"
            elif parts.path and not (page.parent / unquote(parts.path)).exists():
                yield f"{page.relative_to(site)}: {address} is missing"


def main() -> None:
    shutil.rmtree(BUILD, ignore_errors=True)
    for path in reached(ROOT / "README.md"):
        target = BUILD / "source" / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build"], cwd=ROOT, env=quiet, capture_output=True, text=True
    )
    if built.returncode != 0:  # --quiet would disable strict mode
        raise SystemExit(built.stdout + built.stderr)
    if found := list(faults(BUILD / "site")):
        raise SystemExit("\n".join(found))
    print(f"{BUILD / 'site' / 'index.html'}: {len(list((BUILD / 'site').rglob('*.html')))} pages")


if __name__ == "__main__":
    main()
