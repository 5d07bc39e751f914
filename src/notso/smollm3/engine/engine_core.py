"""The engine thread, which accepts requests, runs steps, emits events, updates statistics and does idle-time work."""

from __future__ import annotations

import contextvars
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from notso.qtensor import DeviceLostError
from notso.smollm3.engine.prefix_warmup import QUIET_S, PrefixWarmup
from notso.smollm3.engine.request import Request
from notso.smollm3.errors import EngineError, EngineLostError, ModelError, NotsoError, Sentence
from notso.smollm3.kv.offload import BlockMover, KVOffload
from notso.smollm3.model.lora import Adapter
from notso.smollm3.model.model_runner import ModelRunner
from notso.smollm3.output.generation import require_process
from notso.smollm3.scheduling.block_pool import BLOCK_TOKENS, OutOfBlocksError
from notso.smollm3.scheduling.ngram_drafter import StepLatency
from notso.smollm3.scheduling.scheduler import FEW_ROWS, TILE_ROWS, PrefillBudget, Scheduler
from notso.smollm3.scheduling.sequence import MAX_SAMPLED, Chunk, Plan, Sequence
from notso.smollm3.values.events import Event, FinishReason, Progress
from notso.smollm3.values.model_info import EngineStats


class WorkSignal:
    """Wake-up signal. `wake` is thread-safe."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._woken = False

    def wake(self) -> None:
        with self._condition:
            self._woken = True
            self._condition.notify()

    def wait(self, timeout_s: float) -> None:
        with self._condition:
            if not self._woken and timeout_s > 0:
                self._condition.wait(timeout_s)
            self._woken = False


# Every waiting request is notified of its queue position once, but only the first NEAR_POSITIONS requests are notified
# of changes. Otherwise, each step could send an event to thousands of requests.
NEAR_POSITIONS = 16

PROGRESS_S = 0.25  # seconds between progress events of a prompt


def notify_queue_positions(queue: Iterable[Sequence], requests: Mapping[Sequence, Request]) -> None:
    """Notify waiting requests of new queue positions."""
    for position, sequence in enumerate(queue, start=1):
        request = requests[sequence]
        if request.started_at:
            continue  # preempted: `queued` events are sent only before a request starts
        if request.queue_position != position and (position <= NEAR_POSITIONS or not request.queue_position):
            request.queue_position = position
            request.generation.write([Event("queued", place=position)])


def notify_progress(request: Request, done: int, now: float, s_per_token: float) -> None:
    """Send a progress event during prefill, unless one was sent recently."""
    if not request.prefilled_at and now - request.progress_sent_at >= PROGRESS_S:
        request.progress_sent_at = now
        request.generation.write([progress(request, done, s_per_token)])


def progress(request: Request, done: int, s_per_token: float) -> Event:
    """Return a progress event; `s_per_token`: 0 if unknown."""
    prefill_progress = Progress(
        done_tokens=min(done, request.prompt_tokens),
        total_tokens=request.prompt_tokens,
        cached_tokens=request.cached_tokens,
        tokens_per_s=1 / s_per_token if s_per_token else 0.0,
    )
    return Event("progress", progress=prefill_progress)


@dataclass(slots=True)
class StepTotals:
    """Counters of `EngineStats`."""

    # Mutable, because every answer updates counters in every step, and creating copies would take measurable time.
    steps_total: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    generated_tokens_total: int = 0
    drafted_tokens_total: int = 0
    accepted_tokens_total: int = 0


RATE_WINDOW_S = 10.0


class TokenRate:
    """Mean number of tokens per second over about the last RATE_WINDOW_S seconds of work."""

    # Older work counts less and less, so that neither a short step nor a change in load makes the rate jump.
    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        kept = math.exp(-seconds / RATE_WINDOW_S)
        self._tokens = kept * self._tokens + tokens
        self._seconds = kept * self._seconds + seconds

    @property
    def per_s(self) -> float:
        return self._tokens / self._seconds if self._seconds else 0.0


Floats = npt.NDArray[np.float32]
T = TypeVar("T")

CLOSED = Sentence("the engine is closed", "engine_closed")
GPU_FAILED = Sentence("the GPU failed during this answer; send the request again", "engine_gpu")
CACHE_BUSY = Sentence("other requests are using the whole cache; try again when they are done", "engine_busy")
FAILED = Sentence("the engine failed; see its log", "engine_failed")

# Target duration, in seconds, of a step that both prefills and decodes. A decoding sequence gets at least one token per
# step, so this is also the target for the time between two tokens of an answer.
MIXED_STEP_S = 0.25

# While requests are running, one block of a finished conversation is offloaded to disk every OFFLOAD_STEPS steps.
OFFLOAD_STEPS = 8

_log = logging.getLogger(__name__)


class EngineCore:
    """Runs all requests step by step in a dedicated thread."""

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        offload: KVOffload | None,
        signal: WorkSignal,
        latency: StepLatency,
        on_device_lost: Callable[[DeviceLostError], None],
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self._signal = signal
        self._latency = latency
        self._prefill_budget = PrefillBudget(MIXED_STEP_S)
        self._offload = offload
        self._mover = BlockMover(runner.cache, scheduler, offload)
        self.background = BackgroundWork(runner, scheduler, offload, self._mover)
        self._steps = 0
        self._inbox: deque[Callable[[], None]] = deque()
        self._inbox_lock = threading.Lock()
        self._closing = self._ended = False
        self._process = os.getpid()
        self._on_device_lost = on_device_lost
        self._is_stuck = False  # True: no request can continue until new work arrives
        self._requests: dict[Sequence, Request] = {}
        self.prompt_s_per_token = 0.0  # 0: not measured yet
        self._totals = StepTotals()
        self._prefill_rate, self._decode_rate = TokenRate(), TokenRate()
        self._thread = threading.Thread(target=self._run, name="notso-engine", daemon=True)
        self._thread.start()

    # Thread-safe

    @property
    def requests(self) -> int:
        return len(self._requests)

    def is_idle(self) -> bool:
        return not self._requests

    def submit(self, request: Request) -> None:
        """Queue a request. Raises EngineError if the engine has ended."""
        request.submitted_at = time.perf_counter()
        self.post(lambda: self._add_request(request))

    def call(self, work: Callable[[], T]) -> T:
        """Run `work` between steps and return its result. Raises EngineError if the engine has ended, or if
        called on the engine thread."""
        self.reject_engine_thread()
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        self.post(run)
        return future.result()

    def reject_engine_thread(self) -> None:
        """Raise EngineError on the engine thread, to prevent deadlock."""
        if threading.current_thread() is self._thread:
            raise EngineError("a subscriber's callback must not wait for the engine")

    def require_process(self) -> None:
        require_process(self._process)

    def stats(self, weight_placement: str) -> EngineStats:
        cache = self.scheduler.pool
        return EngineStats(
            **asdict(self._totals),
            running=len(self.scheduler.running) if self._requests else 0,  # a prefix warm-up is not counted
            waiting=len(self.scheduler.waiting) if self._requests else 0,
            kv_blocks=cache.blocks,
            kv_blocks_used=cache.blocks - cache.available,
            kv_blocks_cached=cache.cached,
            preemptions_total=self.scheduler.preemptions,
            prefill_tokens_per_s=self._prefill_rate.per_s,
            decode_tokens_per_s=self._decode_rate.per_s,
            weight_placement=weight_placement,
        )

    def close(self) -> None:
        if os.getpid() != self._process:  # a forked child has no such thread
            return
        self._closing = True
        self._signal.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def post(self, work: Callable[[], None]) -> None:
        """Run `work` between steps, without waiting. Raises EngineError if the engine has ended."""
        self.require_process()
        with self._inbox_lock:
            if self._ended:
                raise EngineError(CLOSED)
            self._inbox.append(work)
            self.background.record_activity()
        self._signal.wake()

    # On the engine thread

    def _run(self) -> None:
        try:
            self._run_steps()
        finally:
            self._shut_down()

    def _run_steps(self) -> None:
        while not self._closing:
            has_steps = self._requests and not self._is_stuck
            has_work = self._inbox or has_steps or self._closing
            self._signal.wait(0.0 if has_work else self.background.idle_wait_s(is_idle=not self._requests))
            self._is_stuck = False
            try:
                self.runner.adopt_migrated()
                while self._inbox:
                    self._inbox.popleft()()
                self._apply_reader_requests()
                self._steps += 1
                if self._offload is not None and (not self._requests or self._steps % OFFLOAD_STEPS == 0):
                    self._offload.work()
                if self._requests:
                    self._step()
                else:
                    self.background.work(lambda: not (self._inbox or self._closing))
            except DeviceLostError as error:
                self._handle_device_loss(error)
            except Exception as error:
                # Log the error in each request's context, which adds the id of the client's request to the record.
                contexts = [each.generation.context for each in self._requests.values()]
                for context in contexts or [contextvars.copy_context()]:
                    context.run(_log.exception, "a step failed")
                self._fail_all(error)

    def _handle_device_loss(self, error: DeviceLostError) -> None:
        _log.error("the device failed: %s", str(error))  # no traceback: its frames would keep device memory alive
        self._closing = True
        with self._inbox_lock:
            self._ended = True
        self._on_device_lost(error)  # called before requests fail, so that their retries wait for the next engine
        self._fail_all(EngineLostError(GPU_FAILED))
        if self._offload is not None:
            self._offload.discard_offers()

    def _shut_down(self) -> None:
        # Even if an error occurs, waiting callers must be released and the cache folder must be unlocked.
        self._closing = True
        with self._inbox_lock:
            self._ended = True
        final_work: list[Callable[[], None]] = [
            partial(self._finish_request, request, "cancelled") for request in self._requests.values()
        ]
        final_work += self._inbox
        final_work.append(partial(self._fail_all, EngineError(CLOSED)))
        for work in final_work:
            try:
                work()
            except Exception:
                _log.exception("an error occurred while the engine was ending")
        self._inbox.clear()
        if self._offload is not None:
            self._offload.close()

    def _add_request(self, request: Request) -> None:
        if request.is_over and request.output.tokens:  # the replayed answer is already complete
            request.generation.write([*request.initial_events, *request.first_events()])
            self._requests[request.sequence] = request
            self._finish_request(request, "length")
            return
        self._requests[request.sequence] = request
        self.background.prefix_warmup.cancel_draft(request.sequence)
        if request.initial_events:
            request.generation.write(request.initial_events)
        if self._closing:
            self._finish_request(request, "cancelled")
        else:
            self.scheduler.add(request.sequence)

    def _apply_reader_requests(self) -> None:
        for request in list(self._requests.values()):
            if request.generation.stop_requested:
                self._finish_request(request, "cancelled")
            elif request.generation.answer_requested and request.prefilled_at and request.output.in_reasoning:
                request.generation.write(request.close_reasoning())
                self._finish_if_done(request)

    def _step(self) -> None:
        plan = self.scheduler.schedule(self._prompt_tokens(self._draft_tokens()), self.runner.max_rows)
        notify_queue_positions(self.scheduler.queue(), self._requests)
        self._mover.move(plan)
        self._is_stuck = not (plan or plan.preempted)
        if not plan.chunks:
            return
        for chunk in plan.chunks:
            self._start_request(self._requests[chunk.sequence], chunk)
        started_at = time.perf_counter()
        logits = self.runner.run(plan.chunks, lambda layer: self._should_continue(plan, layer))
        if logits is None:
            return
        self._record_step(plan, time.perf_counter() - started_at)
        self._pool_hidden_states(plan)
        self.runner.cache.touch_ahead(max(chunk.sequence.blocks[-1] for chunk in plan.chunks), plan.rows)
        generated = self._totals.generated_tokens_total
        for chunk, rows in zip(plan.chunks, logits, strict=True):
            request = self._requests[chunk.sequence]
            try:
                self._process_chunk(request, chunk, rows)
            except NotsoError as error:
                self._fail(request, error)
            except Exception as error:
                request.generation.context.run(_log.exception, "generation failed")
                self._fail(request, EngineError(_internal_error(error)))
        if all(chunk.count <= FEW_ROWS and not chunk.scores for chunk in plan.chunks):
            generated = self._totals.generated_tokens_total - generated
            self._decode_rate.observe(generated, time.perf_counter() - started_at)

    def _pool_hidden_states(self, plan: Plan) -> None:
        for chunk in plan.chunks:
            pooling = self._requests[chunk.sequence].pooling
            if chunk.scores and pooling is not None:
                pooling.consume(chunk.start, self.runner.hidden_states(chunk))

    def _draft_tokens(self) -> int:
        # Proposes drafts (see ngram_drafter), unless prompts need the rows. Returns the number of rows of decoding
        # sequences, including drafts.
        running = self.scheduler.running
        decoding = [sequence for sequence in running if sequence.pending <= FEW_ROWS]
        rows = sum(sequence.pending for sequence in decoding)
        nothing_to_prefill = len(decoding) == len(running) and not self.scheduler.waiting
        for sequence in running:
            sequence.drafts = []
        for sequence in decoding:
            request = self._requests[sequence]
            if nothing_to_prefill and request.drafter is not None and sequence.pending == 1:
                limit = min(request.remaining_tokens - 1, MAX_SAMPLED - rows)
                sequence.drafts = request.drafter.propose(limit, rows)
                rows += len(sequence.drafts)
        return rows

    def _prompt_tokens(self, decoding: int) -> int:
        room = max(self.runner.max_rows - decoding, 1)
        if not decoding:
            return room
        decode_s = self._latency.seconds(decoding) if decoding <= MAX_SAMPLED else 0.0
        return self._prefill_budget.tokens(decoding, room, decode_s, self.prompt_s_per_token)

    def _start_request(self, request: Request, chunk: Chunk) -> None:
        if request.started_at:
            return
        request.started_at = request.progress_sent_at = time.perf_counter()
        # A waiting request has no drafter, because drafters take memory, and thousands of requests may be waiting.
        if request.create_drafter is not None:
            request.drafter = request.create_drafter()
        self._totals.prompt_tokens_total += request.prompt_tokens
        self._totals.cached_tokens_total += request.cached_tokens
        first_progress = progress(request, chunk.start, self.prompt_s_per_token)
        request.generation.write([*request.first_events(), first_progress])

    def _should_continue(self, plan: Plan, layer: int) -> bool:
        # Called between layers. Reports progress; returns False if the step is no longer needed.
        now = time.perf_counter()
        share = layer / len(self.runner.weights.layers)
        for chunk in plan.chunks:
            done = chunk.start + int(share * chunk.count)
            notify_progress(self._requests[chunk.sequence], done, now, self.prompt_s_per_token)
        return not self._closing and not all(
            self._requests[chunk.sequence].generation.stop_requested for chunk in plan.chunks
        )

    def _process_chunk(self, request: Request, chunk: Chunk, logits: Floats) -> None:
        now = time.perf_counter()
        if chunk.scores and request.prompt_scorer is not None:
            entries = request.prompt_scorer.consume(chunk.start, logits[: chunk.count])
            request.generation.write([Event("prompt", logprobs=entries)] if entries else [])
            logits = logits[chunk.count - 1 :]
        if not chunk.samples:
            self.scheduler.advance(chunk)
            notify_progress(request, chunk.sequence.computed, now, self.prompt_s_per_token)
            return
        if not request.prefilled_at:
            request.prefilled_at = now
            request.generation.write([progress(request, request.prompt_tokens, self.prompt_s_per_token)])
            if request.pooling is not None:
                request.generation.write([Event("embedding", embedding=request.pooling.embedding())])
        if request.is_over:
            self.scheduler.advance(chunk)
            self._finish_if_done(request)
            return
        events, accepted, before = list[Event](), 0, len(request.sequence.tokens)
        for row, draft in zip(logits, [*chunk.drafts, None], strict=True):
            try:
                token, new = request.sample(row)
            except Exception:
                request.generation.write([*events, *request.token_event(before)])
                raise
            events += new
            if request.is_over:
                break
            if request.must_close_reasoning:
                events += [*request.token_event(before), *request.close_reasoning()]
                before = len(request.sequence.tokens)
                break
            if token != draft:
                break
            accepted += 1
        self.scheduler.advance(chunk, accepted)
        request.record_acceptance(len(chunk.drafts), accepted)
        self._totals.generated_tokens_total += accepted + 1
        self._totals.drafted_tokens_total += len(chunk.drafts)
        self._totals.accepted_tokens_total += accepted
        request.generation.write([*events, *request.token_event(before)])
        self._finish_if_done(request)

    def _finish_if_done(self, request: Request) -> None:
        if request.is_over:
            self._finish_request(request, "length")

    def _finish_request(self, request: Request, reason: FinishReason) -> None:
        events = list(request.output.finish(reason))
        events += [
            Event("usage", usage=request.usage()),
            Event(
                "end",
                finish_reason=request.output.finish_reason,
                stop=request.output.stopped_by,
                logprobs=request.output.unreported_logprobs,
            ),
        ]
        self._remove_request(request, events)
        self.background.prefix_warmup.schedule(request)

    def _fail(self, request: Request, error: NotsoError) -> None:
        self._remove_request(request, [Event("error", error=error)])

    def _fail_all(self, error: Exception) -> None:
        failure = error if isinstance(error, ModelError) else EngineError(FAILED)
        for request in list(self._requests.values()):
            self._fail(request, failure)

    def _remove_request(self, request: Request, events: list[Event]) -> None:
        if self._requests.pop(request.sequence, None) is None:
            return
        context = request.generation.context
        # Even if one of these calls fails, the sequence must leave the scheduler, and clients must get the last events.
        try:
            if self._offload is not None:
                self._offload.offer(request.sequence)
        except Exception:
            context.run(_log.exception, "the blocks of a request could not be offered to the disk cache")
        try:
            self.scheduler.remove(request.sequence)
        except Exception:
            context.run(_log.exception, "the blocks of a request could not be released")
        self.background.record_activity()
        request.generation.write(events, last=True)

    def _record_step(self, plan: Plan, seconds: float) -> None:
        self._totals.steps_total += 1
        if any(chunk.scores for chunk in plan.chunks):
            return  # not measured: a step that scores takes longer than other steps of the same size
        prefilling = [chunk for chunk in plan.chunks if chunk.count > FEW_ROWS]
        if not prefilling:
            self._latency.observe(plan.rows, seconds)
            return
        if len(prefilling) < len(plan.chunks):
            self._prefill_budget.observe(plan.rows, seconds)
        if plan.rows < TILE_ROWS:
            return  # not measured: a step smaller than a tile takes as long as a full tile
        mean = self.prompt_s_per_token
        self.prompt_s_per_token = seconds / plan.rows if not mean else 0.5 * mean + 0.5 * seconds / plan.rows
        self._prefill_rate.observe(plan.rows, seconds)


# Seconds between increments of idle work. An increment captures a step for replay, offloads a block of a finished
# conversation, or touches memory so that the system allocates it.
TICK_S = 0.005

MAX_IDLE_WAIT_S = 60.0


class BackgroundWork:
    """Idle-time work on the engine thread."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, offload: KVOffload | None, mover: BlockMover) -> None:
        self._runner = runner
        self._cache = runner.cache
        self._offload = offload
        self._memory_is_touched = False
        self._idle_since = time.monotonic()
        self.prefix_warmup = PrefixWarmup(runner, scheduler, offload, mover)

    def record_activity(self) -> None:
        # Thread-safe.
        self._idle_since = time.monotonic()
        self._memory_is_touched = False

    def idle_wait_s(self, is_idle: bool) -> float:
        wait_s = MAX_IDLE_WAIT_S
        if (is_idle and not self._memory_is_touched) or (self._offload is not None and self._offload.has_work):
            wait_s = TICK_S
        if not is_idle:
            return wait_s
        if not self._runner.has_captured_steps:
            wait_s = min(wait_s, max(TICK_S, QUIET_S - self._idle_s))
        return min(wait_s, self.prefix_warmup.due_s(self._idle_s))

    def work(self, should_continue: Callable[[], bool]) -> None:
        """Do one increment of idle work. A prefill polls `should_continue`, and stops when it returns False."""
        if not self._memory_is_touched:
            blocks = 0 if self._offload is None else self._offload.ready_blocks
            self._memory_is_touched = not self._cache.touch_idle(blocks)
        if not self.prefix_warmup.due_s(self._idle_s):
            self.prefix_warmup.prefill_next(should_continue)
        elif not self._runner.has_captured_steps and self._idle_s >= QUIET_S:
            self._runner.capture_next_step()

    @property
    def _idle_s(self) -> float:
        return time.monotonic() - self._idle_since


class ContextLogits:
    """Computes logits for one context at a time, in pieces between engine steps, without the prompt cache.

    batch_index: a row of the block table that no request uses.
    """

    def __init__(self, core: EngineCore, batch_index: int, vocab_size: int) -> None:
        self._core = core
        self._batch_index = batch_index
        self._vocab_size = vocab_size
        self._lock = threading.Lock()

    def compute(self, tokens: list[int], adapter: Adapter | None = None) -> Floats:
        """Return logits (L, vocab) float32. Raises EngineError if the cache has no room or the engine ends."""
        self._core.reject_engine_thread()
        out = np.empty((len(tokens), self._vocab_size), np.float32)
        sequence = Sequence(tokens, adapter=adapter)
        with self._lock:
            sequence.batch_index = self._batch_index
            try:
                self._core.call(lambda: self._allocate_blocks(sequence))
                at = 0
                while at < len(tokens):
                    at = self._core.call(lambda start=at: self._compute_piece(sequence, start, out))  # type: ignore[misc]
            finally:
                with suppress(EngineError):  # if the engine has ended, there is nothing to free
                    self._core.call(lambda: self._free_blocks(sequence))
        return out

    # On the engine thread

    def _allocate_blocks(self, sequence: Sequence) -> None:
        pool = self._core.scheduler.pool
        try:
            for _ in range(0, len(sequence.tokens), BLOCK_TOKENS):
                sequence.blocks.append(pool.allocate())
        except OutOfBlocksError:
            raise EngineError(CACHE_BUSY) from None

    def _compute_piece(self, sequence: Sequence, start: int, out: Floats) -> int:
        # Pieces are smaller while other requests are running, so that their answers do not stall.
        rest = sequence.tokens[start + 1 : start + (TILE_ROWS if self._core.requests else MAX_SAMPLED)]
        pool, count = self._core.scheduler.pool, 1 + len(rest)
        pool.open_windows(sequence.blocks, start, count)
        rows = self._core.runner.run([Chunk(sequence, start, 1, rest, samples=True)], lambda _: True)
        pool.close_windows(sequence.blocks, start, count)
        end = start + count
        out[start:end] = rows[0] if rows else np.nan
        return end

    def _free_blocks(self, sequence: Sequence) -> None:
        for block in sequence.blocks:
            self._core.scheduler.pool.free(block)


def _internal_error(error: Exception) -> Sentence:
    name = type(error).__name__
    return Sentence(f"internal error: {name}", "engine_internal", name=name)
