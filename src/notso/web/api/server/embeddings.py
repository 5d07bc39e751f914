"""Embeddings in the formats of OpenAI and llama-server."""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from notso.web.api.request_fields.fields import (
    DESCRIBES_CALLER,
    Fields,
    Label,
    Notes,
    Text,
    find_hints,
    hint,
    inert,
    invalid_field,
    notes_in,
    read_fields,
    works,
)
from notso.web.api.request_fields.sampling_fields import TokenIds, Whole, to_prompt_limit
from notso.web.api.shared.api_request import check_prompts, ignored_headers, to_prompts
from notso.web.api.shared.embedding import (
    EMBEDDING_OPTIONS,
    MAX_INPUTS,
    ONE_TOKEN,
    EmbeddingRequest,
    compute_embeddings,
)
from notso.web.api.shared.serializer import large_response
from notso.web.api.shared.serving import read_body
from notso.web.edge.access import GUARDED
from notso.web.engine.model_names import model_id

Inputs = (
    Text
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
    | TokenIds
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
)
UNIT_LENGTH = "embeddings have Euclidean length 1"


class EmbeddingFields(Fields):
    """The body of POST /v1/embeddings."""

    input: Inputs | None = None
    content: Inputs | None = None
    model: Label | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[Whole, Field(ge=1)] | None = None
    embd_normalize: Literal[2] | None = None
    user: Annotated[Label | None, DESCRIBES_CALLER] = None
    task: Annotated[Any, hint("the model does not distinguish tasks of embeddings")] = None
    input_type: Annotated[Any, hint("the model does not distinguish types of input")] = None
    truncate_prompt_tokens: int | None = None


EMBEDDING_NOTES: Notes = {
    "input": works(
        f"a string or a list of token ids, or a list of up to {MAX_INPUTS:,} of these; each must fit the context; "
        "control tokens in strings are not recognized"
    ),
    "content": works("llama-server's name for `input`"),
    "model": works("a name listed by `GET /v1/models`; optional"),
    "encoding_format": works("`float`, or `base64`: 32-bit floats, little-endian"),
    "dimensions": works("the model's own number of dimensions", "the model was not trained for other dimensions"),
    "embd_normalize": inert(f"2: {UNIT_LENGTH}", UNIT_LENGTH),
    "truncate_prompt_tokens": works("texts with more tokens are refused, never cut; -1: only the context limits them"),
} | notes_in(EmbeddingFields)

router = APIRouter()


@router.post("/v1/embeddings", dependencies=[GUARDED])
@router.post("/embeddings", dependencies=[GUARDED])
async def embeddings(request: Request) -> Response:
    """Return each text's embedding: the normalized mean of its last-layer hidden states.

    SmolLM3 was not trained for this.
    """

    api_request = await read_body(request, parse_embedding_request)
    found = await compute_embeddings(request, api_request)

    def body() -> dict[str, Any]:
        encode = base64_of if api_request.as_base64 else list
        data = [
            {"object": "embedding", "index": index, "embedding": encode(vector)}
            for index, vector in enumerate(found.vectors)
        ]
        usage = {"prompt_tokens": found.prompt_tokens, "total_tokens": found.prompt_tokens}
        return {"object": "list", "data": data, "model": model_id(found.info), "usage": usage}

    return await large_response(body, ignored_headers(api_request))


@router.post("/embedding", dependencies=[GUARDED])
async def embedding(request: Request) -> Response:
    """Return embeddings in llama-server's format, as with `--pooling mean`."""
    api_request = await read_body(request, parse_embedding_request)
    found = await compute_embeddings(request, api_request)
    body = [{"index": index, "embedding": [vector]} for index, vector in enumerate(found.vectors)]
    return await large_response(lambda: body, ignored_headers(api_request))


def parse_embedding_request(body: Mapping[str, Any]) -> EmbeddingRequest:
    """Validate an embedding request. Raises ApiError (400) naming the field."""
    for name in ("input", "content"):
        check_prompts(name, body.get(name), MAX_INPUTS)
    fields = read_fields(EmbeddingFields, body, EMBEDDING_NOTES)
    name = "content" if fields.input is None and fields.content is not None else "input"
    value = getattr(fields, name)
    if value is None:
        raise invalid_field("input", "input must be a string, a list of token ids, or a list of either")
    if fields.input is not None and fields.content is not None:
        raise invalid_field("content", "only one of input and content is allowed")
    prompts = to_prompts(value)
    if not all(prompts):
        raise invalid_field(name, f"{name} contains an empty string", "empty_prompt")
    return EmbeddingRequest(
        model=fields.model,
        prompts=prompts,
        params=ONE_TOKEN,
        options=EMBEDDING_OPTIONS,
        names={"messages": name, "prompt": name},
        hints=find_hints(fields, body),
        prompt_limit=to_prompt_limit(fields.truncate_prompt_tokens),
        dimensions=fields.dimensions,
        as_base64=fields.encoding_format == "base64",
    )


def base64_of(vector: Sequence[float]) -> str:
    """Encode a vector's little-endian 32-bit floats as Base64."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
