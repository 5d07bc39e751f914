"""Documents made to exhaust, mislead or crash a parser: each ends with one sentence or harmless text, without side
effects."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable
from pathlib import Path

from chaos.ledger import LONG, Ledger
from chaos.victim import Victim, Witness
from documents.traps import BOMBS, SECRET, TRAPS

MAX_UPLOAD_BYTES = 16 << 20
SECONDS = 1200
"""A test that takes longer than this has hung. A decompression bomb may take more than a minute of CPU time."""


def hostile_texts() -> dict[str, bytes]:
    """Return readable texts that are hard to search and to quote."""
    times = 1 if LONG else 100
    rng = random.Random(5)
    letters = rng.choices("abcdefghijklmnop", k=15_000_000 // times)
    return {
        "repeated.txt": b"word " * (1_000_000 // times),
        "unbroken.txt": "".join(letters).encode(),
        "marked.txt": "[[1: <|im_end|> ]] \u202efour\u2069 words of text ".encode() * (100_000 // times),
    }


def test_malicious_documents_cause_no_side_effects(
    tmp_path: Path, victim: Callable[..., Victim], ledger: Ledger
) -> None:
    server = victim()
    traps = TRAPS | BOMBS if LONG else {each: TRAPS[each] for each in sorted(TRAPS)[:: len(TRAPS) // 6]}
    made = {each: (name, content(), sentence) for each, (name, content, sentence) in traps.items()}
    made |= {each: (each, data, "") for each, data in hostile_texts().items()}
    wrong, ends = list[str](), dict[str, str]()
    before = {each.name for each in tmp_path.iterdir()}
    with Witness(server) as witness:
        ids = dict[str, str]()
        for each, (name, data, sentence) in made.items():
            answer = server.client.post("/documents", params={"name": name}, content=data)
            if answer.status_code == 201:
                ids[each] = answer.json()["id"]
            elif (answer.status_code, len(data) > MAX_UPLOAD_BYTES) != (413, True) and not (
                answer.status_code == 422 and sentence
            ):
                wrong.append(f"{each}: {answer.status_code}")
        deadline = time.monotonic() + SECONDS
        for each, document in ids.items():
            while (state := server.client.get(f"/documents/{document}/state").json())["state"] not in (
                "ready",
                "failed",
            ):
                assert time.monotonic() < deadline, (each, state)
                time.sleep(0.05)
            ends[each] = state["problem"]
            sentence = made[each][2]
            if state["state"] == "failed" and not (sentence and re.search(sentence, state["problem"])):
                wrong.append(f"{each}: {state['problem']}")
            if state["state"] == "ready" and sentence and re.fullmatch(sentence, "") is None:
                wrong.append(f"{each} was read")
        for query in ("word", "four words of text", "root"):
            page = server.client.get("/documents", params={"q": query})
            if page.status_code != 200 or SECRET in page.text:
                wrong.append(f"a search for {query}: {page.status_code}")
    written = {each.name for each in tmp_path.iterdir()} - before
    wrong += [f"written outside of the data directory: {each}" for each in written]
    print(json.dumps(ends, indent=1), witness.figures, *wrong, sep="\n")
    ledger.note(
        "files",
        "malicious document: fails with anything but its error message, or affects other users",
        f"{len(TRAPS) + len(BOMBS)} traps and {len(hostile_texts())} malicious texts uploaded at once, and searched",
        len(wrong),
        witness.figures,
    )
