"""OpenAI text completions: fields, routes and response format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from notso.smollm3 import MAX_TOP_LOGPROBS, Event, InvalidRequestError, RequestOptions, TokenLogprob
from notso.web.api.request_fields.fields import (
    Notes,
    Text,
    find_hints,
    inert,
    invalid_field,
    read_fields,
    refused,
    works,
)
from notso.web.api.request_fields.sampling_fields import (
    GRAMMAR_NOTES,
    MAX_PROMPTS,
    TEXT_FORMAT,
    WITHIN_SAMPLING,
    GrammarFields,
    TextFormat,
    TokenIds,
    Whole,
    get_by_alias,
    read_grammar,
    to_sampling_params,
)
from notso.web.api.shared.api_request import ApiRequest, check_prompts, to_prompts
from notso.web.api.shared.completion import (
    Choice,
    Completion,
    count_characters,
    fingerprint,
    legacy_logprobs,
    new_id,
    timings,
)
from notso.web.api.shared.serializer import ChunkSerializer, progress_body
from notso.web.api.shared.services import Services
from notso.web.api.shared.serving import read_body, respond, run_prompt_work, serving
from notso.web.edge.access import GUARDED
from notso.web.engine.model_names import model_id

MAX_SCORED = 1_000_000
"""Maximum number of prompt log probabilities per request. In text prompts, each character counts as a token."""
DEFAULT_MAX_TOKENS = 16  # as in OpenAI's API


class TextFields(GrammarFields):
    """The body of POST /v1/completions."""

    prompt: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    )
    echo: bool | None = None
    logprobs: Annotated[Whole, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    # The following fields are accepted only with values that have no effect.
    suffix: Literal[""] | None = None
    response_format: TextFormat | None = None


TEXT_NOTES: Notes = GRAMMAR_NOTES | {
    "prompt": works(
        f"a string or a list of token ids, or a list of up to {MAX_PROMPTS} of these; each is continued; "
        "control tokens in strings are not recognized"
    ),
    "max_tokens": works(
        "maximum tokens; default 16, as in OpenAI's API; 0: only process the prompt; if it is -1 or larger than the "
        "remaining context, as many as fit"
    ),
    "echo": works(
        "true: return the prompt before the answer, with the log probabilities of its tokens if `logprobs` is set"
    ),
    "logprobs": works(
        "number of most likely tokens to return at each position, 0 to 20, in the four lists of OpenAI's completions"
    ),
    "suffix": inert("an empty string", "the model was not trained to fill in the middle; use a chat completion"),
    "response_format": inert(TEXT_FORMAT, "use json_schema, or /v1/chat/completions"),
    "tools": refused("use /v1/chat/completions"),
    "messages": refused("use /v1/chat/completions, or a prompt"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest(ApiRequest):
    texts: tuple[str, ...] = ()  # text of each prompt; '' for token ids until `decode_prompts` decodes them
    echo: bool = False


def parse_text_request(body: Mapping[str, Any]) -> TextRequest:
    """Validate a text completion request. Raises ApiError (400) naming the field."""
    check_prompts("prompt", body.get("prompt"), MAX_PROMPTS)
    fields = read_fields(TextFields, body, TEXT_NOTES, WITHIN_SAMPLING)
    prompts = to_prompts(fields.prompt)
    if not all(prompts):
        raise invalid_field("prompt", "prompt is empty", "empty_prompt")
    scored = fields.logprobs if fields.echo else None
    if scored is not None and (work := sum(map(len, prompts)) * (1 + scored)) > MAX_SCORED:
        raise invalid_field(
            "logprobs", f"prompt characters or token ids x (1 + logprobs) is {work:,}; the maximum is {MAX_SCORED:,}"
        )
    grammar, grammar_field = read_grammar(fields)
    requested = get_by_alias(fields, "max_tokens", "max_new_tokens", "n_predict")
    max_tokens = DEFAULT_MAX_TOKENS if requested is None else requested
    return TextRequest(
        **fields.common,
        prompts=prompts,
        texts=tuple(prompt if isinstance(prompt, str) else "" for prompt in prompts),
        params=to_sampling_params(fields, max_tokens or 1),
        hints=find_hints(fields, body),
        names={
            **{"messages": "prompt", "top_logprobs": "logprobs", "prompt_logprobs": "logprobs"},
            "response_format": grammar_field,
        },
        options=RequestOptions(
            thinking=False,
            grammar=grammar,
            logits_processors=tuple(fields.logits_processors or ()),
            top_logprobs=fields.logprobs,
            prompt_logprobs=scored,
            prompt_only=max_tokens == 0,
            is_plain=True,
        ),
        echo=bool(fields.echo),
    )


def decode_prompts(api_request: TextRequest, detokenize: Callable[[Sequence[int]], str]) -> TextRequest:
    """Decode prompts given as token ids. Raises ApiError (400) for invalid ids."""
    try:
        texts = tuple(
            prompt if isinstance(prompt, str) else detokenize([each for each in prompt if isinstance(each, int)])
            for prompt in api_request.prompts
        )
    except InvalidRequestError as error:
        raise invalid_field("prompt", str(error)) from None
    return replace(api_request, texts=texts)


class TextSerializer(ChunkSerializer):
    def __init__(self, api_request: TextRequest, completion: Completion) -> None:
        texts = api_request.texts if api_request.echo else ("",) * len(api_request.texts)
        self._echoed_texts = [text for text in texts for _ in api_request.params]
        self._prompts: list[list[TokenLogprob]] = [[] for _ in self._echoed_texts]
        super().__init__(api_request, completion, "text_completion")
        self._request = api_request

    def fresh_copy(self) -> TextSerializer:
        return TextSerializer(self._request, self._completion)

    def initial_events(self) -> Iterator[bytes]:
        for number, echoed in enumerate(self._echoed_texts):
            if echoed:
                yield self._chunk(number, {"text": echoed})

    def feed(self, number: int, event: Event) -> Iterator[bytes]:
        choice = self._choices[number]
        more = choice.timings_so_far(event)
        if event.kind == "prompt":
            scores = legacy_logprobs(event.logprobs, count_characters(self._prompts[number]))
            self._prompts[number] += event.logprobs
            yield self._chunk(number, {"text": ""}, None, scores)
        written = len(self._echoed_texts[number]) + len(choice.content)
        delta = choice.add(event)
        if delta is not None and "content" in delta:
            logprobs = legacy_logprobs(event.logprobs, written) if self._has_logprobs else None
            yield self._chunk(number, {"text": delta["content"]}, None, logprobs, **more)
        elif event.progress is not None and self._request.return_progress:
            yield self._chunk(number, {"text": ""}, prompt_progress=progress_body(event.progress))
        if event.kind == "end":
            remaining_logprobs = legacy_logprobs(event.logprobs, written) if event.logprobs else None
            yield self._chunk(number, {"text": ""}, choice.reason, remaining_logprobs, timings=timings([choice]))

    def body(self) -> dict[str, Any]:
        return self._head | {
            "choices": [self._entry(number, choice) for number, choice in enumerate(self._choices)],
            "usage": self._usage(),
            "timings": timings(self._choices),
        }

    def _entry(self, number: int, choice: Choice) -> dict[str, Any]:
        entries = choice.content_logprobs
        logprobs = None if entries is None else legacy_logprobs([*self._prompts[number], *entries], 0)
        return {
            "index": number,
            "text": self._echoed_texts[number] + choice.content,
            "logprobs": logprobs,
            "finish_reason": choice.reason,
        }


router = APIRouter()


@router.post("/v1/completions", dependencies=[GUARDED])
async def completions(request: Request, services: Services) -> Response:
    """Create a completion of a text. Disconnecting stops it, unless X-Conversation-Id or Idempotency-Key was sent."""
    api_request = await read_body(request, parse_text_request)
    if api_request.echo and not all(api_request.texts):
        parsed = api_request
        async with serving(services, api_request.model) as model:
            api_request = await run_prompt_work(request, lambda: decode_prompts(parsed, model.engine.detokenize))
    return await respond(
        request,
        api_request,
        lambda info: TextSerializer(api_request, Completion(model_id(info), fingerprint(info), new_id("cmpl-"))),
    )
