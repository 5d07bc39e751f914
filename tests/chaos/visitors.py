"""Simulated users who ask, follow the answer as the page does, and ask again, sometimes in a new chat.

Run as a separate program, so that its cost does not slow the witness: `python visitors.py ADDRESS HEAVY LOOK_SECONDS`.
HEAVY users ask again at once, and one light user pauses. Each event is printed as a line: `accepted NAME WORDS`,
`served NAME`, `refused NAME`, `failed NAME why`. The program ends when its standard input closes.
"""

from __future__ import annotations

import re
import sys
import threading
import time

import httpx

from notso.web.values.ids import new_id

PATIENCE_SECONDS = 300.0
LIGHT_PAUSE_SECONDS = 0.5
TURNS_OF_A_CHAT = 6
_STREAM = re.compile(r"/generations/([\w-]+)/events")


class Visitor:
    """If refused, this user retries sooner than the server asked."""

    def __init__(self, address: str, name: str, look_seconds: float, pause: float) -> None:
        self._client = httpx.Client(base_url=address, timeout=PATIENCE_SECONDS)
        self._name, self._look, self._pause = name, look_seconds, pause
        self._chat = ""
        self._served = 0

    def run(self, over: threading.Event) -> None:
        while not over.is_set():
            try:
                self._turn(over)
            except httpx.HTTPError as error:
                self._say("failed", repr(error))
        self._client.close()

    def _turn(self, over: threading.Event) -> None:
        words = f"{self._name}-{self._served}"
        begins = self._served % TURNS_OF_A_CHAT == 0
        path = "/chats" if begins else f"{self._chat}/messages"
        headers = {} if begins else {"HX-Request": "true"}
        answer = self._client.post(path, data={"text": words, "key": new_id()}, headers=headers)
        if answer.status_code == 429:
            told = int(answer.headers.get("retry-after", "0"))
            self._say("refused" if 1 <= told <= 60 else "failed", f"after {told}")
            over.wait(self._look)
        elif answer.status_code == (303 if begins else 200):
            self._say("accepted", words)
            if begins:
                self._chat = answer.headers["location"]
                answer = self._client.get(self._chat)
            self._follow(answer.text)
            self._served += 1
            self._say("served")
            over.wait(self._pause)
        else:
            self._say("failed", str(answer.status_code))

    def _follow(self, page: str) -> None:
        """Read the stream to its end; if there are too many readers, poll the page as its script does."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (stream := _STREAM.search(page)) is not None:
            with self._client.stream("GET", f"/generations/{stream[1]}/events") as events:
                for _ in events.iter_raw():
                    pass
                if events.status_code == 200:
                    return
            if time.monotonic() > deadline:
                self._say("failed", "an answer never ended")
                return
            time.sleep(self._look)
            page = self._client.get(self._chat).text

    def _say(self, what: str, more: str = "") -> None:
        sys.stdout.write(f"{what} {self._name} {more}\n")
        sys.stdout.flush()


def main(address: str, heavy: int, look_seconds: float) -> None:
    over = threading.Event()
    visitors = [Visitor(address, f"heavy{number}", look_seconds, 0.0) for number in range(heavy)]
    visitors.append(Visitor(address, "light", look_seconds, LIGHT_PAUSE_SECONDS))
    threads = [threading.Thread(target=visitor.run, args=(over,)) for visitor in visitors]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    over.set()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
