"""Ollama's endpoints: chat, generate, embeddings, and discovery of version, models and capabilities.

An answer is a single JSON object, or a stream of JSON lines, the last of which has `done` set. Endpoints that change
models return errors.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from notso.extras import installed_release
from notso.smollm3 import Event, Message, ModelInfo
from notso.web.api.ollama.fields import (
    PULL_NOTES,
    SHOW_NOTES,
    OllamaRequest,
    PullFields,
    ShowFields,
    encode_context,
    parse_chat,
    parse_embed,
    parse_embedding,
    parse_generate,
)
from notso.web.api.request_fields.fields import invalid_field, unsupported_field
from notso.web.api.request_fields.sampling_fields import sampling_names
from notso.web.api.shared.api_request import ignored_headers
from notso.web.api.shared.completion import Choice, fingerprint, logprob_entries, new_choice, new_id, parse_arguments
from notso.web.api.shared.embedding import EmbeddingRequest, Embeddings, compute_embeddings
from notso.web.api.shared.listing import NANOSECONDS_PER_SECOND, modified_ns
from notso.web.api.shared.serializer import Serializer, as_json, large_response
from notso.web.api.shared.services import ApiServices, Services, api_services
from notso.web.api.shared.serving import (
    CONVERSATION,
    read_body,
    read_fields_and_headers,
    resolve_model_choice,
    respond,
    run_prompt_work,
    serving,
)
from notso.web.edge.access import GUARDED, caller_of
from notso.web.edge.errors import ApiError
from notso.web.engine.model_names import LATEST, ModelChoice, accepted_names, model_id, other_installed_models
from notso.web.engine.models import InstalledModel
from notso.web.values.durations import MAX_SECONDS
from notso.web.values.wording import words

NANOSECONDS_PER_MILLISECOND = 1_000_000
MEDIA_TYPE = "application/x-ndjson"


class OllamaSerializer(Serializer):
    def __init__(self, api_request: OllamaRequest, model: str) -> None:
        self._request = api_request
        self._model = model
        self._created = timestamp(datetime.now(UTC))
        self._choice = new_choice(logprobs=api_request.options.top_logprobs is not None)
        self._calls: list[dict[str, Any]] = []  # excludes cut-off calls, because their arguments are not valid JSON
        self._last_logprobs: dict[str, Any] = {}
        self.id = new_id("ollama-")
        # Sent to keep the connection alive. JSON lines have no comments (unlike SSE), so this is a line without text.
        self.ping = self._line(self._piece())

    def fresh_copy(self) -> OllamaSerializer:
        copy = OllamaSerializer(self._request, self._model)
        copy.id, copy._created, copy.ping = self.id, self._created, self.ping
        return copy

    def feed(self, number: int, event: Event) -> Iterator[bytes]:
        self._choice.add(event)
        logprobs = {"logprobs": logprob_entries(event.logprobs)} if event.logprobs else {}
        match event.kind:
            case "end":
                self._last_logprobs = logprobs
            case "text":
                yield self._line(self._piece(text=event.text) | logprobs)
            case "reasoning":
                yield self._line(self._piece(thinking=event.text) | logprobs)
            case "tool_call" if event.tool_call is not None:
                call, arguments = event.tool_call, parse_arguments(event.tool_call)
                function = {"index": len(self._calls), "name": call.name, "arguments": arguments}
                self._calls.append({"id": call.id, "function": function})
                yield self._line(self._piece(calls=self._calls[-1:]))

    def closing_events(self) -> Iterator[bytes]:
        # The last line contains the token counts, and the log probabilities of tokens after the last visible text.
        yield self._line(self._piece() | self._last_logprobs | self._end())

    def error_frame(self, error: ApiError) -> bytes:
        return self._line(error.ollama_body)

    def body(self) -> dict[str, Any]:
        choice = self._choice
        logprobs = [*(choice.reasoning_logprobs or ()), *(choice.content_logprobs or ())]
        whole = self._piece(text=choice.content, thinking=choice.reasoning, calls=self._calls)
        return whole | ({"logprobs": logprob_entries(logprobs)} if logprobs else {}) | self._end()

    def empty_body(self, reason: str) -> dict[str, Any]:
        return self._piece() | {"done": True, "done_reason": reason}

    def _piece(self, text: str = "", thinking: str = "", calls: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        extra = ({"thinking": thinking} if thinking else {}) | ({"tool_calls": calls} if calls else {})
        if self._request.is_chat:
            answer: dict[str, Any] = {"message": {"role": "assistant", "content": text, **extra}}
        else:
            answer = {"response": text, **extra}
        return {"model": self._model, "created_at": self._created, **answer, "done": False}

    def _end(self) -> dict[str, Any]:
        reason = "length" if self._choice.finish_reason == "length" else "stop"  # Ollama reports "stop" for tool calls
        return {"done": True, "done_reason": reason, **self._context()} | _counts(self._choice)

    def _context(self) -> dict[str, Any]:
        prompt = self._request.prompts[0]
        if not self._request.returns_context or isinstance(prompt, str):
            return {}
        messages = [each for each in prompt if isinstance(each, Message)]
        return {"context": encode_context([*messages, Message("assistant", self._choice.content)])}

    @staticmethod
    def _line(value: dict[str, Any]) -> bytes:
        return as_json(value).encode() + b"\n"


def timestamp(moment: datetime) -> str:
    """Format a UTC time as Ollama does."""
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _counts(choice: Choice) -> dict[str, int]:
    # Returns token counts, and times in nanoseconds. The times do not include loading the model.
    usage = choice.usage
    if usage is None:
        return {}
    return {
        "total_duration": _nanoseconds(usage.queue_ms + usage.prompt_ms + usage.completion_ms),
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": _nanoseconds(usage.prompt_ms),
        "eval_count": usage.completion_tokens,
        "eval_duration": _nanoseconds(usage.completion_ms),
    }


def _nanoseconds(milliseconds: float) -> int:
    return round(milliseconds * NANOSECONDS_PER_MILLISECOND)


LIBRARY_NAMES = {"smollm3": "smollm3-3b", "smollm3:3b": "smollm3-3b"}
"""Names in Ollama's model library -> names in the other APIs."""


def resolve_ollama_name(name: str | None, info: ModelInfo | None) -> str | None:
    """Convert the default model's Ollama name to its name in the other APIs."""
    if name is None:
        return None
    short = name.lower().removesuffix(LATEST)
    api_name = LIBRARY_NAMES.get(short, short)
    return api_name if info is not None and api_name in accepted_names(info) else name


def listed_name(info: ModelInfo) -> str:
    return with_tag(model_id(info))


def with_tag(name: str) -> str:
    return name if ":" in name else name + LATEST


discovery_router = APIRouter()

API_VERSION = "0.14.2"
"""Version of Ollama whose APIs are implemented here. Clients require a version with OpenAI's Responses API (0.13.4 for
Codex) and Anthropic's API (0.14)."""
FAMILY = "smollm3"
CAPABILITIES = ("completion", "tools", "thinking")
# Expiry of a model that stays loaded: about as distant as in Ollama, but long before the end of the year 9999, which
# Python cannot convert to time zones east of UTC.
NEVER = "2200-01-01T00:00:00Z"
# Defaults for models that have not been loaded. Zed and Roo Code show no models if any model lacks these fields.
_FILE_DETAILS = {"parent_model": "", "format": "gguf", "family": FAMILY, "families": [FAMILY]} | {
    "parameter_size": "",
    "quantization_level": "unknown",
}
IGNORED_FORMATS = frozenset({"F32"})  # norms have this format even in quantized files


@discovery_router.head("/", dependencies=[GUARDED])
async def heartbeat() -> Response:
    """Return an empty response. Ollama's command line sends this request to detect servers."""
    return Response()


@discovery_router.get("/api/version", dependencies=[GUARDED])
@discovery_router.head("/api/version", dependencies=[GUARDED])
async def version() -> Response:
    """Return the implemented version of Ollama's API, and the server's own version."""
    return JSONResponse({"version": API_VERSION, "notso": installed_release()})


@discovery_router.get("/api/tags", dependencies=[GUARDED])
@discovery_router.head("/api/tags", dependencies=[GUARDED])
async def tags(services: Services) -> Response:
    """List models, the default first. The list is empty until the first load of the default model ends."""
    host, registry = services.shared.engine, services.shared.model_registry
    info = host.info
    listed = [await asyncio.to_thread(_loaded_entry, info)] if info is not None else []
    if registry is not None and (listed or host.state == "failed"):
        others = await asyncio.to_thread(other_installed_models, host, registry)
        listed += await asyncio.to_thread(lambda: [_installed_entry(each) for each in others])
    return JSONResponse({"models": listed})


@discovery_router.get("/api/ps", dependencies=[GUARDED])
async def running_models(services: Services) -> Response:
    """List loaded models and when they will be unloaded if idle."""
    host, models = services.shared.engine, []
    for served in host.loaded():
        if served.info is None:
            continue
        entry = await asyncio.to_thread(_loaded_entry, served.info)
        if served is not host.default and served.name:
            entry |= {"name": with_tag(served.name), "model": with_tag(served.name)}
        expires = _expiry(host.idle_timeout_s(served))
        models.append(entry | {"expires_at": expires, "size_vram": 0, "context_length": served.info.context_tokens})
    return JSONResponse({"models": models})


def _expiry(idle_timeout_s: float) -> str:
    if not 0 <= idle_timeout_s <= MAX_SECONDS:
        return NEVER
    return timestamp(datetime.now(UTC) + timedelta(seconds=idle_timeout_s))


@discovery_router.post("/api/show", dependencies=[GUARDED])
async def show(request: Request, services: Services) -> Response:
    """Describe a model by any of its names."""
    fields, headers = await read_fields_and_headers(request, ShowFields, SHOW_NOTES, of_any_type=True)
    served = services.shared.engine.model((await _find_model(services, fields)).model)
    info = served.info
    shown: dict[str, Any] = {
        "license": "",
        "modelfile": f"FROM {with_tag(served.name) if info is None else listed_name(info)}\n",
        "parameters": "",
        "template": "",
        "details": _FILE_DETAILS,
        "model_info": {"general.architecture": FAMILY, "general.basename": served.name},
        "capabilities": CAPABILITIES,
    }
    if info is not None:  # otherwise, the model has never been loaded, and only its name and file are known
        shown |= {"license": info.license, "parameters": _parameters(info), "details": _details(info)}
        shown["model_info"] |= {
            "general.basename": info.name,
            "general.parameter_count": info.parameter_count,
            f"{FAMILY}.block_count": info.num_hidden_layers,
            f"{FAMILY}.context_length": info.context_tokens,
        }
        shown["modified_at"] = _modified_at(await asyncio.to_thread(modified_ns, info.path))
    return JSONResponse(shown, headers=headers)


async def _find_model(services: ApiServices, fields: ShowFields | PullFields) -> ModelChoice:
    name = fields.model or fields.name
    if not name:
        raise invalid_field("model", "model is required")
    return await resolve_model_choice(services, resolve_ollama_name(name, services.shared.engine.default.info))


def _loaded_entry(info: ModelInfo) -> dict[str, Any]:
    return _entry(listed_name(info), modified_ns(info.path), info.size_bytes, fingerprint(info), _details(info))


def _installed_entry(installed: InstalledModel) -> dict[str, Any]:
    # The digest of a loaded model is a hash of its fingerprint, which is known only after loading. Here, the digest is
    # a hash of the model's name, and of the size and modification time of its file.
    model, modified = installed.model, modified_ns(installed.model.path)
    name = "-".join(model.name.lower().split())
    details = _FILE_DETAILS | ({"quantization_level": model.quantization} if model.quantization else {})
    return _entry(with_tag(name), modified, model.size_bytes, repr((name, model.size_bytes, modified)), details)


def _entry(name: str, modified: int, size: int, identity: str, details: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "model": name,
        "modified_at": _modified_at(modified),
        "size": size,
        "digest": hashlib.sha256(identity.encode()).hexdigest(),
        "details": details,
    }


def _details(info: ModelInfo) -> dict[str, Any]:
    count = info.parameter_count
    return _FILE_DETAILS | {
        "parameter_size": f"{count / 1e9:.1f}B" if count >= 10**9 else f"{count / 1e6:.2f}M",
        "quantization_level": _main_format(info.quantization),
        "context_length": info.context_tokens,
    }


def _parameters(info: ModelInfo) -> str:
    names = sampling_names("ollama")
    values = {names[name]: value for name, value in info.sampling.items() if name in names}
    return "\n".join(f"{name:<30} {value:g}" for name, value in values.items())


def _modified_at(nanoseconds: int) -> str:
    return timestamp(datetime.fromtimestamp(nanoseconds / NANOSECONDS_PER_SECOND, UTC))


def _main_format(tensors: Mapping[str, int]) -> str:
    weights = {name: count for name, count in tensors.items() if name.upper() not in IGNORED_FORMATS} or tensors
    return max(weights, key=lambda name: weights[name], default="unknown").upper()


router = APIRouter()


@router.post("/api/chat", dependencies=[GUARDED])
async def chat(request: Request) -> Response:
    """Generate the next chat message, in Ollama's format. Disconnecting stops it, unless Idempotency-Key was sent."""
    return await _answer(request, await _read(request, parse_chat))


@router.post("/api/generate", dependencies=[GUARDED])
async def generate(request: Request) -> Response:
    """Create a completion of a prompt, in Ollama's format. Disconnecting stops it, unless Idempotency-Key was sent."""
    return await _answer(request, await _read(request, parse_generate))


async def _read(request: Request, parse: Callable[[Mapping[str, Any]], OllamaRequest]) -> OllamaRequest:
    if CONVERSATION in request.headers:
        raise unsupported_field(
            CONVERSATION, "X-Conversation-Id is not supported here, because a stream of JSON lines cannot be resumed"
        )
    return await read_body(request, parse, of_any_type=True)


async def _answer(request: Request, api_request: OllamaRequest) -> Response:
    services, requested_name = api_services(request), api_request.model
    host = services.shared.engine
    api_request = replace(api_request, model=resolve_ollama_name(requested_name, host.default.info))
    # Other users share the model, so only operators control how long it stays loaded.
    if api_request.keep_alive_s is not None and not caller_of(request).is_operator:
        if (api_request.only_loads and api_request.keep_alive_s == 0) or services.shared.settings.strict_fields:
            raise ApiError(403, "forbidden", words["error_operator"], param="keep_alive")
        api_request = replace(api_request, keep_alive_s=None, ignored=(*api_request.ignored, "keep_alive"))
    if api_request.only_loads:
        headers = await run_prompt_work(request, lambda: ignored_headers(api_request))
        choice = await resolve_model_choice(services, api_request.model)
        served = host.model(choice.model)
        if api_request.keep_alive_s == 0:  # unloading must not load the model first
            host.keep(served, 0)
            name, reason = requested_name or served.name, "unload"
        else:
            async with serving(services, api_request.model) as model:
                host.keep(served, api_request.keep_alive_s)
                name, reason = requested_name or listed_name(model.info), "load"
        body = OllamaSerializer(api_request, name).empty_body(reason)
        return JSONResponse(body, headers=headers)
    response = await respond(
        request, api_request, lambda info: OllamaSerializer(api_request, requested_name or listed_name(info))
    )
    if api_request.stream:
        response.headers["content-type"] = MEDIA_TYPE
    return response


@router.post("/api/embed", dependencies=[GUARDED])
async def embed(request: Request) -> Response:
    """Return an embedding of each text: the normalized mean of its last-layer hidden states."""
    api_request = await read_body(request, parse_embed, of_any_type=True)
    found, name = await _embeddings(request, api_request)
    counts = {
        "total_duration": _nanoseconds(sum(usage.queue_ms + usage.prompt_ms for usage in found.usages)),
        "load_duration": 0,
        "prompt_eval_count": found.prompt_tokens,
    }
    body = {"model": name, "embeddings": found.vectors} | counts
    return await large_response(lambda: body, ignored_headers(api_request))


@router.post("/api/embeddings", dependencies=[GUARDED])
async def embed_one(request: Request) -> Response:
    """Return the embedding of one text, in Ollama's older format."""
    api_request = await read_body(request, parse_embedding, of_any_type=True)
    found, _ = await _embeddings(request, api_request)
    vector = found.vectors[0] if found.vectors else ()
    return await large_response(lambda: {"embedding": vector}, ignored_headers(api_request))


async def _embeddings(request: Request, api_request: EmbeddingRequest) -> tuple[Embeddings, str]:
    model = resolve_ollama_name(api_request.model, api_services(request).shared.engine.default.info)
    found = await compute_embeddings(request, replace(api_request, model=model))
    return found, api_request.model or listed_name(found.info)


@router.post("/api/pull", dependencies=[GUARDED])
async def pull(request: Request, services: Services) -> Response:
    """Report success for an installed model. Others are not downloaded."""
    # Programs pull a model before they use it for the first time, or if /api/tags lists its name only with a tag.
    fields, headers = await read_fields_and_headers(request, PullFields, PULL_NOTES, of_any_type=True)
    try:
        await _find_model(services, fields)
    except ApiError as error:
        if error.status != 404:
            raise
        raise _not_managed() from error
    success = {"status": "success"}
    if fields.stream is False:
        return JSONResponse(success, headers=headers)
    return Response(as_json(success) + "\n", headers=headers, media_type=MEDIA_TYPE)


def _not_managed() -> ApiError:
    return ApiError(400, "not_supported", "this API does not manage models; use `notso pull` or the Models page")


@router.post("/api/push", dependencies=[GUARDED])
@router.post("/api/create", dependencies=[GUARDED])
@router.post("/api/copy", dependencies=[GUARDED])
@router.delete("/api/delete", dependencies=[GUARDED])
async def manage() -> Response:
    """Not supported: models are managed by the web page and the command line."""
    raise _not_managed()
