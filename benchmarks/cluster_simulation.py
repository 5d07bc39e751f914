"""Simulate the effect of routing on cache hits and on the time to the first token in clusters of 10 to 200 machines,
with machine failures. Every printed figure is simulated, from step times measured on one machine.

    python benchmarks/cluster_simulation.py --out benchmarks/results/cluster-simulation.json

A machine computes steps one after another. A step processes one token of each running answer and up to PREFILL_ROWS
tokens of the prompt that has waited longest; its duration was measured (`benchmarks/results`) for its number of rows.
Users begin conversations at random times, read, think and ask again. Cached parts of a prompt take no time; when a
cache is full, the least recently used conversations are evicted. A machine that fails loses its cache and its requests,
which are sent to other machines; later, a new machine with an empty cache replaces it.

Policies: `random` chooses any running machine, `least loaded` the one with the fewest requests, and `affinity` the one
that the conversation hashes to on a ring with 64 points per machine, so that a failure moves only the conversations of
the failed machine.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import json
import random
from bisect import bisect
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
POLICIES = ("random", "least loaded", "affinity")
PREFILL_ROWS = 64
MOST_ANSWERS = 16
CACHE_TOKENS = 160_000
"""6 GB of keys and values in k8v8, at 36,864 bytes per position."""
SYSTEM_TOKENS = 300
"""System prompt, the same in every conversation, which a machine has cached after its first request."""
QUESTION_TOKENS, ANSWER_TOKENS = (20, 200), (50, 350)
TURNS = (1, 10)
THINKING_SECONDS = (5.0, 60.0)
DOWN_SECONDS = 60.0
RING_POINTS = 64
WARM_UP_SECONDS = 120.0


@dataclass(frozen=True)
class Costs:
    """Milliseconds of a step by its number of rows, interpolated linearly between measurements."""

    rows: tuple[int, ...]
    ms: tuple[float, ...]

    def __call__(self, rows: int) -> float:
        at = min(max(1, bisect(self.rows, rows)), len(self.rows) - 1)
        (x0, x1), (y0, y1) = self.rows[at - 1 : at + 1], self.ms[at - 1 : at + 1]
        return y0 + (y1 - y0) * (rows - x0) / (x1 - x0)

    @classmethod
    def measured(cls) -> Costs:
        engine = json.loads((RESULTS / "llama-cpp.json").read_text())
        turns = json.loads((RESULTS / "chats.json").read_text())["chats"]["turn"]["turns"]
        points = {1: engine["decode"][0]["step_ms_p50"]}
        points |= {each["sequences"]: 1000 * each["sequences"] / each["tok_s"] for each in engine["batch"]}
        points |= {each["new_tokens"]: each["ms"] for each in turns if each["new_tokens"] > MOST_ANSWERS}
        points |= {each["tokens"]: 1000 * each["tokens"] / each["tok_s"] for each in engine["prefill"]}
        return cls(tuple(sorted(points)), tuple(points[rows] for rows in sorted(points)))


@dataclass(eq=False)
class Conversation:
    number: int
    turns_left: int
    tokens: int = SYSTEM_TOKENS


@dataclass(eq=False)
class Request:
    conversation: Conversation
    prompt: int
    answer: int
    asked: float
    to_read: int = -1
    written: int = 0


@dataclass(eq=False)
class Machine:
    """`cache` maps conversations to the number of cached tokens, least recently used first."""

    number: int
    up: bool = True
    running: bool = False
    life: int = 0
    has_system: bool = False
    waiting: deque[Request] = field(default_factory=deque)
    writing: list[Request] = field(default_factory=list)
    cache: OrderedDict[int, int] = field(default_factory=OrderedDict)
    cached: int = 0

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.writing)

    def known(self, conversation: Conversation) -> int:
        return self.cache.get(conversation.number, SYSTEM_TOKENS if self.has_system else 0)

    def keep(self, conversation: Conversation, tokens: int) -> None:
        self.has_system = True
        self.cached += tokens - self.cache.pop(conversation.number, 0)
        self.cache[conversation.number] = tokens
        while self.cached > CACHE_TOKENS and len(self.cache) > 1:
            self.cached -= self.cache.popitem(last=False)[1]

    def die(self) -> list[Request]:
        lost = [*self.waiting, *self.writing]
        self.waiting.clear()
        self.writing.clear()
        self.cache.clear()
        self.cached, self.up, self.running, self.has_system = 0, False, False, False
        self.life += 1
        return lost


@dataclass
class Outcome:
    machines: int
    routing: str
    turns: int = 0
    cached_share: float = 0.0
    first_token_p50_s: float = 0.0
    first_token_p99_s: float = 0.0
    deaths: int = 0
    asked_again: int = 0


class Simulation:
    """A simulation run. `people`: mean number of new conversations per machine per minute; `life_seconds`: mean time to
    a machine's failure."""

    def __init__(
        self,
        machines: int,
        routing: str,
        costs: Costs,
        *,
        seed: int,
        seconds: float,
        people: float,
        life_seconds: float,
    ) -> None:
        self.outcome = Outcome(machines, routing)
        self._rng = random.Random(seed)  # arrivals, the same for every policy
        self._luck = random.Random(seed + 1)
        self._fate = random.Random(seed + 2)  # failures
        self._costs, self._seconds = costs, seconds
        self._machines = [Machine(number) for number in range(machines)]
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = 0
        self._first_tokens: list[float] = []
        self._asked = self._found = self._conversations = 0
        ring = [(_hashed(f"{number}/{point}"), number) for number in range(machines) for point in range(RING_POINTS)]
        self._ring = sorted(ring)
        self._arrivals_s = 60.0 / (people * machines)
        self._life_s = life_seconds
        self._at(self._rng.expovariate(1 / self._arrivals_s), self._arrive)
        for machine in self._machines:
            self._at(self._fate.expovariate(1 / life_seconds), lambda now, machine=machine: self._die(machine, now))

    def run(self) -> Outcome:
        while self._events and self._events[0][0] < self._seconds:
            now, _, act = heapq.heappop(self._events)
            act(now)
        ranked = sorted(self._first_tokens)
        self.outcome.turns = len(ranked)
        self.outcome.cached_share = round(self._found / max(1, self._asked), 4)
        self.outcome.first_token_p50_s = round(ranked[len(ranked) // 2], 3)
        self.outcome.first_token_p99_s = round(ranked[int(0.99 * len(ranked))], 3)
        return self.outcome

    def _at(self, when: float, act: Callable[[float], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, (when, self._order, act))

    def _arrive(self, now: float) -> None:
        self._conversations += 1
        conversation = Conversation(self._conversations, self._rng.randint(*TURNS))
        self._ask(conversation, now)
        self._at(now + self._rng.expovariate(1 / self._arrivals_s), self._arrive)

    def _ask(self, conversation: Conversation, now: float) -> None:
        rng = random.Random(f"{conversation.number}/{conversation.turns_left}")
        prompt = conversation.tokens + rng.randint(*QUESTION_TOKENS)
        self._route(Request(conversation, prompt, rng.randint(*ANSWER_TOKENS), now), now)

    def _route(self, request: Request, now: float) -> None:
        up = [machine for machine in self._machines if machine.up]
        if not up:
            self._at(now + 1.0, lambda later: self._route(request, later))
            return
        if self.outcome.routing == "random":
            machine = self._luck.choice(up)
        elif self.outcome.routing == "least loaded":
            fewest = min(each.load for each in up)
            machine = self._luck.choice([each for each in up if each.load == fewest])
        else:
            at = bisect(self._ring, (_hashed(str(request.conversation.number)), -1))
            while not (machine := self._machines[self._ring[at % len(self._ring)][1]]).up:
                at += 1
        machine.waiting.append(request)
        self._step_soon(machine, now)

    def _step_soon(self, machine: Machine, now: float) -> None:
        if not machine.running and machine.load:
            machine.running = True
            self._step(machine, now)

    def _step(self, machine: Machine, now: float) -> None:
        """Start a step: its rows are chosen now, and its results are available when it ends."""
        reading = machine.waiting[0] if machine.waiting and len(machine.writing) < MOST_ANSWERS else None
        rows = len(machine.writing)
        if reading is not None:
            if reading.to_read < 0:
                known = min(machine.known(reading.conversation), reading.prompt - 1)
                reading.to_read = reading.prompt - known
                if now >= WARM_UP_SECONDS:
                    self._asked += reading.prompt
                    self._found += known
            rows += min(PREFILL_ROWS, reading.to_read)
        end, life = now + self._costs(rows) / 1000, machine.life
        self._at(end, lambda then: self._end(machine, reading, then) if machine.life == life else None)

    def _end(self, machine: Machine, reading: Request | None, now: float) -> None:
        still: list[Request] = []
        for request in machine.writing:
            request.written += 1
            if request.written < request.answer:
                still.append(request)
            else:
                self._finish(machine, request, now)
        machine.writing = still
        if reading is not None:
            reading.to_read -= PREFILL_ROWS
            if reading.to_read <= 0:
                machine.waiting.popleft()
                reading.written = 1
                machine.writing.append(reading)
                if reading.asked >= WARM_UP_SECONDS:
                    self._first_tokens.append(now - reading.asked)
        machine.running = False
        self._step_soon(machine, now)

    def _finish(self, machine: Machine, request: Request, now: float) -> None:
        conversation = request.conversation
        conversation.tokens = request.prompt + request.answer
        conversation.turns_left -= 1
        machine.keep(conversation, conversation.tokens)
        if conversation.turns_left > 0:
            think = random.Random(-conversation.number * 100 - conversation.turns_left).uniform(*THINKING_SECONDS)
            self._at(now + think, lambda later: self._ask(conversation, later))

    def _die(self, machine: Machine, now: float) -> None:
        self.outcome.deaths += 1
        for request in machine.die():
            self.outcome.asked_again += 1
            request.to_read, request.written = -1, 0
            self._route(request, now)
        self._at(now + DOWN_SECONDS, lambda later: self._come_back(machine, later))

    def _come_back(self, machine: Machine, now: float) -> None:
        machine.up = True
        self._at(now + self._fate.expovariate(1 / self._life_s), lambda later: self._die(machine, later))


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--machines", type=int, nargs="+", default=[10, 50, 100, 200])
    parser.add_argument("--minutes", type=float, default=20.0, help="minutes of simulated time")
    parser.add_argument("--people", type=float, default=1.2, help="new conversations per minute per machine")
    parser.add_argument("--life-minutes", type=float, default=60.0, help="mean time to a machine's failure")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    costs, rows = Costs.measured(), []
    for machines in asked.machines:
        for routing in POLICIES:
            simulation = Simulation(
                machines,
                routing,
                costs,
                seed=asked.seed,
                seconds=60 * asked.minutes,
                people=asked.people,
                life_seconds=60 * asked.life_minutes,
            )
            rows.append(asdict(simulation.run()))
            print("simulated", json.dumps(rows[-1]), flush=True)
    if asked.out is not None:
        options = {name: value for name, value in vars(asked).items() if name not in ("out", "machines")}
        steps = dict(zip(costs.rows, costs.ms, strict=True))
        asked.out.write_text(
            json.dumps({"simulated": True, **options, "step_ms_by_rows": steps, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
