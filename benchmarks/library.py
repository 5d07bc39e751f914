"""Measure documents on a real server: parsing, the first question, later questions, and disk usage.

    notso synth build/words-3b.gguf --tokenizer tokenizer.json
    python benchmarks/library.py build/words-3b.gguf --pages 30 --files 200 --book 500

Measures a PDF, a folder of text files, and a book. All pages of the book are parsed, "ask every part" runs on two of
its parts, and the time for the whole book is extrapolated. Times are measured over HTTP, as for a user of the page, and
prompt figures are read from the page. Answers are truncated. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import html
import random
import re
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from notso.documents.passages import estimated_tokens
from notso.smollm3.diagnostics.benchmark import StolenTime, describe_machine
from notso.web.values.ids import new_id

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

from documents.made import text_pdf  # noqa: E402
from server import Server  # noqa: E402

ANSWER_TOKENS = 16
"""Limit of an answer's tokens, because a model with random weights does not end its answers."""
WORDS_A_PAGE = 380
WORDS_A_LINE = 12
PARTS = 2
"""Number of parts of the book that "ask every part" reads."""
NUMBERS = re.compile(
    r"prompt: ([\d,]+) tokens in ([\d.]+) s(?:, ([\d,]+) cached)?.*?first token after ([\d.]+) s", re.S
)


def words() -> list[str]:
    """Return the words of the documentation, which are in the vocabulary of tokenizers."""
    text = " ".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    return [each for each in re.findall(r"[a-z]{2,}", text) if each.isascii()]


def page_of(rng: random.Random, known: list[str], number: int) -> list[str]:
    drawn = rng.choices(known, k=WORDS_A_PAGE)
    lines = [" ".join(drawn[at : at + WORDS_A_LINE]) for at in range(0, len(drawn), WORDS_A_LINE)]
    return [f"Page {number}: {lines[0]}", *lines[1:]]


class User:
    """Uploads documents and asks about them as the page does."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def send(self, path: str, body: bytes) -> tuple[str, str]:
        """Send a POST request without following redirects; return the body and the redirect's target."""
        request = urllib.request.Request(f"http://127.0.0.1:{self._server.port}{path}", body, method="POST")
        opener = urllib.request.build_opener(_Stays)
        try:
            with opener.open(request) as answer:
                return answer.read().decode(), ""
        except urllib.error.HTTPError as error:
            if error.code == 303:
                return "", str(error.headers["location"])
            raise SystemExit(f"{path}: {error.code} {error.read().decode()[:300]}") from None

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._server.port}{path}") as answer:
            return str(answer.read().decode())

    def upload(self, name: str, data: bytes) -> str:
        said, _ = self.send(f"/documents?name={urllib.parse.quote(name)}", data)
        found = re.search(r'"id": ?"([^"]+)"', said)
        assert found, said
        return found[1]

    def parsed(self, document: str) -> None:
        while '"state":"ready"' not in (state := self.get(f"/documents/{document}/state").replace(" ", "")):
            if '"failed"' in state:
                raise SystemExit(state)
            time.sleep(0.05)

    def ask(self, text: str, *documents: str, **more: str) -> tuple[float, str]:
        """Ask in a new chat; return the seconds until the answer is complete, and the page."""
        fields: dict[str, str] = {"text": text, "key": new_id(), **more}
        for number, each in enumerate(documents, start=1):
            fields |= {f"file-{number}-name": "document", f"file-{number}-document": each}
        began = time.monotonic()
        _, chat = self.send("/chats", urllib.parse.urlencode(fields).encode())
        while 'data-state="running"' in (page := self.get(chat)) or 'data-state="queued"' in page:
            time.sleep(0.1)
        return time.monotonic() - began, page

    def report(self, what: str, text: str, *documents: str, **more: str) -> float:
        seconds, page = self.ask(text, *documents, **more)
        shown = html.unescape(re.sub(r"<[^>]+>", " ", page[page.rfind("data-state=") :]))
        state = re.match(r'data-state="(\w+)"', page[page.rfind("data-state=") :])
        numbers = NUMBERS.search(shown)
        said = f"{shown[:200]!r}"
        if numbers:
            said = f"prompt of {numbers[1]} tokens, {numbers[3] or 0} of them cached, first token after {numbers[4]} s"
        print(f"{what}: {seconds:.1f} s ({state[1] if state else 'no answer'}; {said})", flush=True)
        return seconds


class _Stays(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def disk_mb(folder: str) -> float:
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()) / 1e6


def measure(user: User, folder: str, given: argparse.Namespace) -> None:
    rng, known = random.Random(1), words()
    user.send("/settings", urllib.parse.urlencode({"max_tokens": ANSWER_TOKENS}).encode())

    def timed_upload(name: str, pages: int) -> tuple[str, int]:
        made = [page_of(rng, known, number) for number in range(1, pages + 1)]
        data, tokens = text_pdf(*made), sum(estimated_tokens("\n".join(each)) for each in made)
        began = time.monotonic()
        document = user.upload(name, data)
        sent = time.monotonic()
        user.parsed(document)
        print(
            f"{name}, {pages} pages, {len(data) / 1e6:.1f} MB, about {tokens:,} tokens:"
            f" uploaded in {sent - began:.2f} s, parsed after {time.monotonic() - sent:.2f} s,"
            f" disk {disk_mb(folder):.1f} MB",
            flush=True,
        )
        return document, tokens

    report, _ = timed_upload("report.pdf", given.pages)
    user.report("  first question", "What is it about?", report)
    user.report("  another question in another chat", "Who wrote it?", report)
    print(f"  disk {disk_mb(folder):.1f} MB")

    began = time.monotonic()
    files = [user.upload(f"note-{at}.txt", "\n".join(page_of(rng, known, at)).encode()) for at in range(given.files)]
    for each in files:
        user.parsed(each)
    print(
        f"{given.files} files: uploaded and parsed in {time.monotonic() - began:.1f} s, disk {disk_mb(folder):.1f} MB"
    )
    began = time.monotonic()
    user.get("/documents?q=" + urllib.parse.quote(" ".join(rng.choices(known, k=5))))
    print(f"  search in all of them: {time.monotonic() - began:.2f} s")

    _, all_tokens = timed_upload("book.pdf", given.book)
    before = disk_mb(folder)
    volumes, tokens = timed_upload("two parts of the book.pdf", given.part_pages)
    first = user.report("  every part, first question", "How many are there?", volumes, every="1")
    later = user.report("  every part, later question", "And how few are there?", volumes, every="1")
    used = disk_mb(folder) - before
    share = all_tokens / tokens
    print(
        f"  extrapolated to {given.book} pages: first question {share * first:,.0f} s, later {share * later:,.0f} s,"
        f" disk {share * used:,.0f} MB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--pages", type=int, default=30)
    parser.add_argument("--files", type=int, default=200)
    parser.add_argument("--book", type=int, default=500)
    parser.add_argument("--part-pages", type=int, default=44, help="pages that are about two parts of the book")
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()
    stolen = StolenTime()
    options = [] if given.threads is None else ["--threads", str(given.threads)]
    server = Server(given.model, [*options, "--no-browser"])
    try:
        measure(User(server), server.folder.name, given)
    finally:
        server.close()
    print(describe_machine() | {"stolen_percent": round(stolen.percent(), 2)})


if __name__ == "__main__":
    main()
