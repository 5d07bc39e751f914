"""Measure concurrent and long chats: pauses of running answers, first tokens of later turns, restarts, and memory.

    python benchmarks/chats.py build/synth-3b.gguf
    python benchmarks/chats.py build/synth-3b.gguf --parts gap --out benchmarks/results/chats.json

- gap: the times between the tokens of an answer while a prompt of 4,096 tokens is prefilled.
- turn: the time to the first token of a second turn with 1, 16 and 64 new tokens, and the time of a decode step.
- next-turn: the same times for a second question of eight words, after an answer with and without reasoning. The
  question follows immediately, or after a second in which the engine can prefill ahead.
- typed: the same times for second questions of 8 and 200 words. The engine receives their draft one or two seconds
  before they are sent, as while a user types, or not at all.
- restore: the time to restore 8,192 tokens of a conversation that another process wrote to the on-disk cache, from the
  page cache and from the disk; for comparison, the time to read the files.
- memory-64k, memory-128k: resident memory with a full context, in k8v4 and k4v3.

Each part runs in a separate process and takes about a minute; `--out` replaces the results of the parts that ran.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

from notso import Engine, Message, RequestOptions, SamplingParams, Usage, __version__
from notso.qtensor import TILE_POSITIONS
from notso.smollm3.diagnostics.benchmark import EngineMeter, GenerationWatch, StolenTime, describe_machine
from notso.smollm3.engine import input_processor
from notso.smollm3.values.engine_config import KVChoice, Placement

PROMPT_TOKENS = 4096
FIRST_TURN_TOKENS = 512
GENERATION_TOKENS = 24
NEW_TOKENS = (1, 16, 64)
PAUSE_S = 1.0
QUESTION = "And what should I do about it now?"
SENTENCE = "The sea is wide and cold. "
QUESTION_TOKENS = 128
TYPED = ((8, 0.0), (8, PAUSE_S), (200, 0.0), (200, PAUSE_S), (200, 2 * PAUSE_S))
"""Number of words, and seconds before they are sent at which the engine receives them (0: not at all)."""
VOCABULARY = ["sea", "wide", "cold", "land", "fish", "ship", "wind", "rain", "stone", "river", "bird", "sand"]
KEPT_TOKENS = 8192
WAIT_SECONDS = 120.0
MEMORY_PARTS: dict[str, tuple[int, KVChoice]] = {"memory-64k": (65_536, "k8v4"), "memory-128k": (131_072, "k4v3")}

Stats = dict[str, Any]


def gap(file: Path, chats: int = 1) -> Stats:
    """Measure the times between tokens of answers while a long prompt is prefilled."""
    with load(file, PROMPT_TOKENS + 2048) as engine:
        meter = EngineMeter(engine, seed=1)
        # Let the engine learn the prefill speed, which it knows in a running server.
        meter.run_watched(meter.random_ids(FIRST_TURN_TOKENS), 1)
        running = [
            GenerationWatch(engine.submit(meter.random_ids(8), meter.params(max_tokens=1500))) for _ in range(chats)
        ]
        while min(len(watch.times) for watch in running) < 16:
            time.sleep(0.01)
        asked = time.perf_counter()
        other = GenerationWatch(engine.submit(meter.random_ids(PROMPT_TOKENS), meter.params(max_tokens=1)))
        other.finish()
        answered = time.perf_counter()
        for watch in running:
            watch.stop()
        timed = [(at - asked, step) for watch in running for at, step in gaps(watch)]
        during = [step for at, step in timed if 0 < at <= answered - asked]
        before = [step for at, step in timed if at <= 0]
        longest = sorted((step, at) for at, step in timed if 0 < at <= answered - asked)[:-6:-1]
        return about(engine) | {
            "chats": chats,
            "prompt_tokens": PROMPT_TOKENS,
            "prompt_s": round(answered - asked, 2),
            "step_ms": milliseconds(statistics.median(before)),
            "gaps": len(during),
            **{f"gap_ms_p{share}": milliseconds(quantile(during, share)) for share in (50, 90, 99)},
            "gap_ms_max": milliseconds(max(during)),
            "longest": [{"ms": milliseconds(step), "at_s": round(at, 2)} for step, at in longest],
        }


def turn(file: Path, repeats: int = 3) -> Stats:
    """Measure the time to the first token of second turns."""
    firsts: dict[int, list[float]] = {new: [] for new in NEW_TOKENS}
    steps: list[float] = []
    with load(file, 2048) as engine:
        meter = EngineMeter(engine, seed=1)
        for _ in range(repeats + 1):
            for new in NEW_TOKENS:
                began, step, first = second_turn(engine, meter, new)
                steps.append(step)
                firsts[new].append(first)
        for new in NEW_TOKENS:
            del firsts[new][0]  # the first round warms up pages and records steps
        step = statistics.median(steps)
        return about(engine) | {
            "first_turn_tokens": FIRST_TURN_TOKENS + GENERATION_TOKENS,
            "step_ms": milliseconds(step),
            "turns": [
                {"new_tokens": new, "cached_tokens": began, "ms": milliseconds(statistics.median(values))}
                | {"ms_min": milliseconds(min(values)), "ms_max": milliseconds(max(values))}
                for new, values in firsts.items()
            ],
            "repeats": repeats,
        }


def second_turn(engine: Engine, meter: EngineMeter, new: int) -> tuple[int, float, float]:
    """Return the number of cached tokens of a second turn, the seconds of a decode step in the first turn, and the
    seconds to the second turn's first token."""
    word = next(iter(meter.params(max_tokens=1).logit_bias))  # biased, so that the answer repeats a known word
    params = SamplingParams(max_tokens=GENERATION_TOKENS, temperature=0.0, logit_bias={word: 100.0})
    prompt = meter.random_ids(FIRST_TURN_TOKENS)
    first_turn = GenerationWatch(engine.submit(prompt, params))
    first_turn.finish()
    following = prompt + [word] * GENERATION_TOKENS + meter.random_ids(new)
    asked = time.perf_counter()
    watch = GenerationWatch(engine.submit(following, meter.params(max_tokens=1)))
    watch.finish()
    return watch.usage.cached_tokens, statistics.median(first_turn.steps), watch.times[0] - asked


def next_turn(file: Path, repeats: int = 2) -> Stats:
    """Measure the time to the first token of second questions, asked immediately and after a second."""
    rows, steps = [], list[float]()
    with load(file, 2048) as engine:
        meter = EngineMeter(engine, seed=1)
        conversation(engine, meter, PAUSE_S, thinks=False)  # warms up pages and records steps
        for thinks in (False, True):
            for pause_s in (0.0, PAUSE_S):
                timed = [conversation(engine, meter, pause_s, thinks) for _ in range(repeats)]
                usage, firsts = timed[0][0], [first for _, first, _ in timed]
                steps += [step for _, _, step in timed]
                rows.append(
                    {"thinks": thinks, "pause_s": pause_s, "prompt_tokens": usage.prompt_tokens}
                    | {"cached_tokens": usage.cached_tokens, "ms": milliseconds(statistics.median(firsts))}
                    | {"ms_min": milliseconds(min(firsts)), "ms_max": milliseconds(max(firsts))}
                )
        return about(engine) | {"step_ms": milliseconds(statistics.median(steps)), "turns": rows, "repeats": repeats}


def typed(file: Path, repeats: int = 3) -> Stats:
    """Measure the time to the first token of second questions with and without prefill while they are typed."""
    rows, steps, words = [], list[float](), random.Random(1)
    with load(file, 2048) as engine:
        meter = EngineMeter(engine, seed=1)
        for thinks in (False, True):
            history = begun(engine, meter, thinks)
            time.sleep(PAUSE_S)
            for count, pause_s in TYPED:
                timed = []
                for _ in range(repeats + 1):
                    draft = [*history, Message("user", " ".join(words.choices(VOCABULARY, k=count)))]
                    if pause_s:
                        engine.speculative_prefill(draft, options=RequestOptions(thinking=thinks))
                        time.sleep(pause_s)
                    timed.append(answered(engine, meter, draft, thinks))
                del timed[0]  # the first warms up pages and records steps
                new = [usage.prompt_tokens - usage.cached_tokens for usage, _, _ in timed]
                firsts = [first for _, first, _ in timed]
                steps += [step for _, _, step in timed]
                rows.append(
                    {"thinks": thinks, "words": count, "pause_s": pause_s, "new_tokens": statistics.median(new)}
                    | {"ms": milliseconds(statistics.median(firsts))}
                    | {"ms_min": milliseconds(min(firsts)), "ms_max": milliseconds(max(firsts))}
                )
        return about(engine) | {"step_ms": milliseconds(statistics.median(steps)), "turns": rows, "repeats": repeats}


def conversation(engine: Engine, meter: EngineMeter, pause_s: float, thinks: bool) -> tuple[Usage, float, float]:
    """Return usage, seconds to the first token and seconds of a decode step for a second question."""
    history = begun(engine, meter, thinks)
    time.sleep(pause_s)
    return answered(engine, meter, [*history, Message("user", QUESTION)], thinks)


def begun(engine: Engine, meter: EngineMeter, thinks: bool) -> list[Message]:
    """Return a question and its answer."""
    thought = f"<think>\n{SENTENCE}\n</think>\n" if thinks else ""
    said = engine.tokenize(f"{thought}{6 * SENTENCE}<|im_end|>", special=True)
    question = Message("user", engine.detokenize(meter.random_ids(QUESTION_TOKENS)))
    with mock.patch.object(input_processor, "Sampler", lambda *_: Scripted(said)):
        events = list(
            engine.generate([question], SamplingParams(max_tokens=len(said)), RequestOptions(thinking=thinks))
        )
    return [question, Message("assistant", "".join(event.text for event in events if event.kind == "text"))]


def answered(engine: Engine, meter: EngineMeter, messages: list[Message], thinks: bool) -> tuple[Usage, float, float]:
    """Return usage, seconds to the first token and seconds of a decode step of an answer."""
    params = meter.params(max_tokens=4)
    asked = time.perf_counter()
    watch = GenerationWatch(engine.submit(messages, params, RequestOptions(thinking=thinks)))
    watch.finish()
    return watch.usage, watch.times[0] - asked, statistics.median(watch.steps)


class Scripted:
    """Sampler that returns given tokens, because a model with random weights would not end its answers."""

    def __init__(self, tokens: list[int]) -> None:
        self._left = list(tokens)

    def sample(self, *_: object) -> int:
        return self._left.pop(0)


def restore(file: Path) -> Stats:
    """Write a conversation in one process; restore it in others, from the page cache and from the disk."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        written = run_alone(file, "restore-write", folder)
        files = [path for path in Path(folder).iterdir() if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        warm = run_alone(file, "restore-read", folder)
        drop_from_memory(files)
        cold = run_alone(file, "restore-read", folder)
        drop_from_memory(files)
        began = time.perf_counter()
        for path in files:
            path.read_bytes()
        plain = time.perf_counter() - began
    rows = [{"files_in": "memory", **warm}, {"files_in": "disk", **cold}]
    return {
        "tokens": KEPT_TOKENS,
        "files_mb": round(size / 1e6, 1),
        "written_s": written["s"],
        "read_s": round(plain, 3),
        "rows": rows,
    }


def drop_from_memory(files: list[Path]) -> None:
    """Drop files from the page cache, so that they are read from the disk."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def restore_write(file: Path, folder: str) -> Stats:
    """Fill the cache with copies of a block, and let the engine write them to disk as usual."""
    with load(file, KEPT_TOKENS + 512, cache_dir=folder) as engine:
        meter = EngineMeter(engine, seed=1)
        began = time.perf_counter()
        meter.run_watched(meter.prompt(KEPT_TOKENS, 1), 1)
        offload = engine._offload
        assert offload is not None
        while offload.has_work:
            time.sleep(0.05)
        offload._files.flush()
        return {"s": round(time.perf_counter() - began, 2)}


def restore_read(file: Path, folder: str) -> Stats:
    """Measure the time to the first token with the conversation on disk, and again with it in memory."""
    with load(file, KEPT_TOKENS + 512, cache_dir=folder) as engine:
        meter = EngineMeter(engine, seed=1)
        prompt = meter.random_ids(KEPT_TOKENS)  # the same seed gives the same conversation
        meter.run_watched(meter.random_ids(1), 4)
        first, found = first_token(engine, meter, [*prompt, *meter.random_ids(1)])
        again, _ = first_token(engine, meter, [*prompt, *meter.random_ids(1)])
        return about(engine) | {
            "cached_tokens": found,
            "first_token_s": round(first, 3),
            "first_token_again_s": round(again, 3),
            "restore_s": round(first - again, 3),
        }


def first_token(engine: Engine, meter: EngineMeter, prompt: list[int]) -> tuple[float, int]:
    """Return the seconds to the first token, and the number of cached prompt tokens."""
    asked = time.perf_counter()
    watch = GenerationWatch(engine.submit(prompt, meter.params(max_tokens=1)))
    watch.finish()
    return watch.times[0] - asked, watch.usage.cached_tokens


def memory(file: Path, context: int, kv: KVChoice) -> Stats:
    """Measure resident memory with a full context: its peak, and its value after an answer at the context's end."""
    with load(file, context, kv=kv) as engine:
        meter = EngineMeter(engine, seed=1)
        depth = context - TILE_POSITIONS
        watch = meter.run_watched(meter.prompt(depth, TILE_POSITIONS - 16), 16)
        if watch.usage.cached_tokens < depth:
            sys.exit("the context was not filled")
        return about(engine) | {
            "context_tokens": context,
            "kv_format": kv,
            "peak_mb": round(memory_mb("VmHWM"), 1),
            "resident_mb": round(memory_mb("VmRSS"), 1),
            "anonymous_mb": round(memory_mb("RssAnon"), 1),
            "file_mb": round(memory_mb("RssFile"), 1),
            "kv_mb": round(engine.info.kv_bytes / 1e6, 1),
            "step_ms": milliseconds(statistics.median(watch.steps)),
        }


def memory_mb(name: str) -> float:
    """Return a value of /proc/self/status in MB (10^6 bytes)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith(f"{name}:"))


def load(file: Path, context: int, kv: KVChoice = "auto", cache_dir: str | None = None) -> Engine:
    """Load an engine as `notso serve` does, but without speculative decoding, and wait for its final weight placement.
    With `cache_dir`, weights stay memory-mapped, as just after a start, when conversations are restored."""
    weights: Placement = "packed" if cache_dir is None else "mmap"
    engine = Engine.load(file, context_tokens=context, kv=kv, cache_dir=cache_dir, speculation=False, weights=weights)
    engine.wait_for_placement(WAIT_SECONDS)
    return engine


def about(engine: Engine) -> Stats:
    """Return the conditions of the measurement."""
    info = engine.info
    return {"kernels": info.kernels, "threads": info.threads, "weights": engine.weight_placement}


def gaps(watch: GenerationWatch) -> list[tuple[float, float]]:
    """Return the arrival time of each token after the first, and the time since the preceding token."""
    return list(zip(watch.times[1:], watch.steps, strict=True))


def quantile(values: list[float], percent: int) -> float:
    """Return a percentile of values."""
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]


def milliseconds(seconds: float) -> float:
    return round(1000 * seconds, 1)


class BusyTime:
    """CPU time of other programs since construction, which lengthens the measured times."""

    def __init__(self) -> None:
        self._busy, self._ours, self._began = busy_seconds(), child_seconds(), time.monotonic()

    def others_percent(self) -> float:
        others = busy_seconds() - self._busy - (child_seconds() - self._ours)
        return max(0.0, 100 * others / (time.monotonic() - self._began) / (os.cpu_count() or 1))


def busy_seconds() -> float:
    """Return the seconds that all processors were neither idle nor waiting for disks since boot."""
    spent = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(spent) - spent[3] - spent[4]) / os.sysconf("SC_CLK_TCK")


def child_seconds() -> float:
    """Return the CPU seconds of child processes that have ended."""
    times = os.times()
    return times.children_user + times.children_system


PARTS = ("gap", "turn", "next-turn", "typed", "restore", *MEMORY_PARTS)


def run_part(file: Path, part: str, folder: str) -> Stats:
    """Run a part in this process."""
    if part in MEMORY_PARTS:
        return memory(file, *MEMORY_PARTS[part])
    if part == "restore-write":
        return restore_write(file, folder)
    if part == "restore-read":
        return restore_read(file, folder)
    return {"gap": gap, "turn": turn, "next-turn": next_turn, "typed": typed, "restore": restore}[part](file)


def run_alone(file: Path, part: str, folder: str = "") -> Stats:
    """Run a part in a separate process."""
    command = [sys.executable, __file__, str(file), "--here", part, "--folder", folder]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: Stats = json.loads(run.stdout)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here:
        print(json.dumps(run_part(given.file, given.here, given.folder)))
        return
    result: Stats = {"chats": {}}
    if given.out is not None and given.out.exists():
        result = json.loads(given.out.read_text())
    for part in given.parts:
        stolen, busy = StolenTime(), BusyTime()
        figures = run_alone(given.file, part)
        machine = describe_machine() | {"stolen_percent": round(stolen.percent(), 2)}
        machine["others_percent"] = round(busy.others_percent(), 2)
        result["chats"][part] = figures | {"machine": machine, "version": __version__}
        print(json.dumps({part: figures}, indent=1))
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
