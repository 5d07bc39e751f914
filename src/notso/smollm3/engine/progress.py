"""What readers hear before the first token: their place in the queue, and how far their prompt is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from notso.smollm3.engine.request import Request
from notso.smollm3.scheduling.sequence import Sequence
from notso.smollm3.values.events import Event, Progress

NEAR_PLACES = 16
"""Who waits further back hears of a place once, and again when it is so near: else all would hear of every step."""

PROGRESS_S = 0.25
"""A prompt's readers hear of it so often."""


def notify_places(queue: Iterable[Sequence], requests: Mapping[Sequence, Request]) -> None:
    """Tell who waits of a new place."""
    for place, sequence in enumerate(queue, start=1):
        request = requests[sequence]
        if request.started_at:
            continue  # it lost its place for a while; its readers are past hearing of queues
        if request.place != place and (place <= NEAR_PLACES or not request.place):
            request.place = place
            request.generation.write([Event("queued", place=place)])


def notify_progress(request: Request, done: int, now: float, s_per_token: float) -> None:
    """Tell a prompt's readers that `done` of its tokens are read, if they have not heard for a while."""
    if not request.read and now - request.notified >= PROGRESS_S:
        request.notified = now
        request.generation.write([progress(request, done, s_per_token)])


def progress(request: Request, done: int, s_per_token: float) -> Event:
    """`done` tokens are read, at `s_per_token` (0: nobody knows)."""
    how_far = Progress(
        done_tokens=min(done, request.prompt_tokens),
        total_tokens=request.prompt_tokens,
        cached_tokens=request.sequence.cached,
        tokens_per_s=1 / s_per_token if s_per_token else 0.0,
    )
    return Event("progress", progress=how_far)
