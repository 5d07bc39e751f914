"""Compute embeddings for all APIs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from fastapi import Request

from notso.smollm3 import ModelInfo, RequestOptions, SamplingParams, Usage
from notso.web.api.request_fields.fields import invalid_field
from notso.web.api.shared.api_request import ApiRequest, Prompt
from notso.web.api.shared.services import api_services
from notso.web.api.shared.serving import generate_choices, run_prompt_work, serving
from notso.web.engine.port import ChatEngine

MAX_INPUTS = 2048
"""Maximum number of texts per request, as in OpenAI's API."""

EMBEDDING_OPTIONS = RequestOptions(prompt_only=True, embedding=True, is_plain=True, thinking=False)
ONE_TOKEN = (SamplingParams(max_tokens=1),)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest(ApiRequest):
    dimensions: int | None = None  # rejected if it differs from the model's number of dimensions
    as_base64: bool = False  # whether to return the numbers as base64
    truncate: bool = False  # whether to cut texts that do not fit the context, instead of rejecting them


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Normalized embeddings in the order of the prompts."""

    info: ModelInfo
    vectors: Sequence[Sequence[float]]
    usages: Sequence[Usage]

    @property
    def prompt_tokens(self) -> int:
        return sum(usage.prompt_tokens for usage in self.usages)


async def compute_embeddings(request: Request, api_request: EmbeddingRequest) -> Embeddings:
    """Compute embeddings, up to `max_num_seqs` at a time. Stops if the client disconnects.

    Raises ApiError or NotsoError.
    """
    if api_request.truncate:
        async with serving(api_services(request), api_request.model) as model:
            prompts = list(api_request.prompts)
            for at, prompt in enumerate(prompts):
                # Long texts are tokenized one at a time, so that other requests need not wait for all of them. A token
                # has at least one byte, and a character at most four, so short texts always fit.
                if isinstance(prompt, str) and 4 * len(prompt) > model.info.context_tokens:
                    prompts[at] = await run_prompt_work(request, partial(_truncate, prompt, model.engine))
        api_request = replace(api_request, prompts=tuple(prompts))
    info, choices = await generate_choices(request, api_request)
    events = list(itertools.chain.from_iterable(choices))
    vectors = [event.embedding for event in events if event.kind == "embedding"]
    if api_request.dimensions is not None and vectors and len(vectors[0]) != api_request.dimensions:
        raise invalid_field(
            "dimensions", f"dimensions must be {len(vectors[0])}: the model was not trained for other dimensions"
        )
    usages = [event.usage for event in events if event.usage is not None]
    return Embeddings(info, vectors, usages)


def _truncate(text: str, engine: ChatEngine) -> Prompt:
    max_tokens = engine.info.context_tokens
    if len(text.encode(errors="replace")) <= max_tokens:
        return text
    return tuple(engine.tokenize(text)[:max_tokens])
