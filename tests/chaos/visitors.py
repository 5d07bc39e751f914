"""People who ask, follow the answer as the page does, and ask again: a program of its own, so that what they cost slows
no witness. `python visitors.py ADDRESS HEAVY LOOK_SECONDS`: so many who ask at once again, and a light one who pauses.

A line is printed for each thing that happened: `accepted NAME WORDS`, `served NAME`, `refused NAME`, `failed NAME why`.
It ends with its standard input.
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
_STREAM = re.compile(r"/generations/([\w-]+)/events")


class Visitor:
    """Refused, it comes back sooner than it was told."""

    def __init__(self, address: str, name: str, look_seconds: float, pause: float) -> None:
        self._client = httpx.Client(base_url=address, timeout=PATIENCE_SECONDS)
        self._name, self._look, self._pause = name, look_seconds, pause
        self._chat = "/chats"
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
        path = self._chat if self._chat == "/chats" else f"{self._chat}/messages"
        answer = self._client.post(path, data={"text": words, "key": new_id()})
        if answer.status_code == 429:
            told = int(answer.headers.get("retry-after", "0"))
            self._say("refused" if 1 <= told <= 60 else "failed", f"after {told}")
            over.wait(self._look)
        elif answer.status_code == 303:
            self._say("accepted", words)
            self._chat = answer.headers["location"]
            self._follow()
            self._served += 1
            self._say("served")
            over.wait(self._pause)
        else:
            self._say("failed", str(answer.status_code))

    def _follow(self) -> None:
        """The page once, then its stream to the end."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (stream := _STREAM.search(self._client.get(self._chat).text)) is not None:
            with self._client.stream("GET", f"/generations/{stream[1]}/events") as events:
                for _ in events.iter_raw():
                    pass
                if events.status_code != 200:
                    time.sleep(self._look)
            if time.monotonic() > deadline:
                self._say("failed", "an answer never ended")
                return

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
