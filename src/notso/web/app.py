"""Create the application: middleware, routes, lifespan and periodic maintenance."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.telemetry import TelemetryConfig
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Match
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from notso.extras import install_line
from notso.plugins.process import Plugins
from notso.smollm3 import release_freed_memory
from notso.web.api.batches import files as batch_files
from notso.web.api.batches import routes as batch_routes
from notso.web.api.batches import vector_stores
from notso.web.api.batches.runner import BatchRunner
from notso.web.api.chat_completions import routes as chat_completions
from notso.web.api.completions import fields as text_completions
from notso.web.api.engine import routes as engine_routes
from notso.web.api.llama_cpp import request as llama_cpp
from notso.web.api.messages import routes as anthropic_messages
from notso.web.api.ollama import routes as ollama
from notso.web.api.responses import routes as responses
from notso.web.api.server import embeddings, models, openapi, server_facts, tokens
from notso.web.api.shared.background import BackgroundResponses
from notso.web.api.shared.idempotency import IdempotencyMiddleware
from notso.web.api.shared.resumable import ResumableStreams
from notso.web.api.shared.services import ApiServices
from notso.web.chat import views
from notso.web.chat.chat_view import read_shown
from notso.web.chat.context_gauge import Compaction
from notso.web.chat.html_cache import HtmlCache
from notso.web.chat.library import LibraryWorker, clear_stale_caches
from notso.web.chat.routes import (
    chats,
    documents,
    messages,
    operator,
    preview,
    projects,
    prompts,
    sharing,
    sign_in,
    tools,
    transfer,
)
from notso.web.chat.routes import models as model_pages
from notso.web.chat.routes import pages as routes
from notso.web.chat.routes import settings as settings_routes
from notso.web.chat.routes import tokens as answer_tokens
from notso.web.chat.services import ChatServices, chat_services
from notso.web.chat.submit import resume_orphan
from notso.web.chat.suggestions import Suggestions
from notso.web.chat.templates import ChatMarkNotifier, PageLanguage, Pages, is_fragment
from notso.web.chat.titles import Titles
from notso.web.edge.access import LOCAL_OWNER, PeerAddress, include_marked, ipv4_network, keys_sent, owner_of
from notso.web.edge.access_log import AccessLog
from notso.web.edge.assets import Assets
from notso.web.edge.errors import CODES, ApiEdge, ApiError, UnexpectedErrors, api_error_of, is_api, show_stopping
from notso.web.edge.limits import BodyError, ChunkedBodies, RequestLimits, StrictHttp
from notso.web.edge.rate_limit import RateLimit
from notso.web.edge.request_paths import BasePath, UnversionedPaths
from notso.web.edge.security import CrossOriginAccess, CrossSiteGuard, HostGuard, OllamaGreeting, SecurityHeaders
from notso.web.engine.host import EngineHost
from notso.web.engine.metrics import Metrics, RequestMetrics
from notso.web.engine.models import ModelRegistry
from notso.web.engine.port import EngineSource
from notso.web.engine.running import RunningRequests
from notso.web.replicas.joining import counters_at, exchange_at
from notso.web.replicas.turn_relay import TurnRelay
from notso.web.services import SharedServices
from notso.web.sign_in.methods import SignInMethods, sign_in_methods
from notso.web.store.access import AccessStore
from notso.web.store.leases import LeaseKeeper
from notso.web.store.opening import create_access_store, create_store
from notso.web.store.protocol import ChatStore, Orphan
from notso.web.store.sqlite.access import SQLiteAccessStore
from notso.web.tools.command_view import CommandView
from notso.web.tools.toolbox import PluginTools, Toolbox, ToolSource, mcp_servers
from notso.web.turns.sse import Feed
from notso.web.turns.turns import Turns
from notso.web.values.durations import current_ms
from notso.web.values.errors import (
    NotsoError,
    Problem,
    StorageError,
    is_thread_shortage,
)
from notso.web.values.fair_queue import FairQueue, WorkerThreads
from notso.web.values.settings import Settings
from notso.web.values.wording import translated, words

if TYPE_CHECKING:
    from notso.web.tools.mcp_servers import McpServers
    from notso.web.tracing import Tracing


logger = logging.getLogger("notso.web")
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def configure_store(settings: Settings) -> ChatStore:
    """Return the conversation store. Raises the same errors as `create_store`."""
    store = create_store(settings.directory, settings.database_url)
    store.max_stored_characters = lambda owner: 0 if owner == LOCAL_OWNER else settings.sign_in.kept_characters
    return store


def configure_access_store(settings: Settings, store: ChatStore) -> AccessStore | None:
    """Return the store of keys and usage, or None if it is not needed."""
    # A shared database always has an access store, because another server may add a key at any time.
    is_shared = settings.database_url is not None
    is_needed = is_shared or settings.is_multi_user or SQLiteAccessStore.exists(settings.directory)
    return create_access_store(settings.directory, settings.database_url, store) if is_needed else None


def configure_tracing(environment: Mapping[str, str] = os.environ) -> Tracing | None:
    is_off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or (
        environment.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none"
    )
    # OpenTelemetry is imported only if an endpoint is configured. If the extra is missing, only a warning is logged,
    # because OTEL_* variables are often set for all services of a host.
    if is_off or not any(environment.get(name) for name in _ENDPOINTS):
        return None
    try:
        from notso.web.tracing import Tracing, add_trace_ids_to_logs
    except ImportError:
        logger.warning("OTEL_* variables are set, but the extra otel is not installed: %s", install_line("otel"))
        return None
    add_trace_ids_to_logs()
    return Tracing()


TEMPORARY_SECONDS = 3600.0  # lifetime of a temporary chat after its last use
# Trash entries are kept for longer than the 10 s for which the page offers undo. While the pointer is over the toast,
# the page continues to offer undo, but the server may then refuse it.
UNDO_SECONDS = 15.0
PURGE_SECONDS = 30.0
TRIM_SECONDS = 60.0


async def purge(shared: SharedServices, turns: Turns) -> None:
    """Periodically expire temporary chats, and permanently delete old trash entries and expired API records."""
    store = shared.store
    while True:
        with contextlib.suppress(NotsoError, RuntimeError):  # RuntimeError: no thread could be started; retried later
            await _trash_expired_chats(shared, turns)
            await store.purge(UNDO_SECONDS)
            await clear_stale_caches(store, shared.engine)
            await store.records.purge(current_ms())
        await asyncio.sleep(PURGE_SECONDS)


async def _trash_expired_chats(shared: SharedServices, turns: Turns) -> None:
    before_ms = current_ms() - int(TEMPORARY_SECONDS * 1000)
    for owner, chat_id in await shared.store.expired_temporary_chats(before_ms):
        with turns.stopping(owner, chat_id):
            await shared.store.trash_chat(owner, chat_id)


async def trim_memory_periodically() -> None:
    """Periodically return freed memory to the system."""
    # The C library keeps an arena for each thread and does not shrink it after a peak. Trimming takes a millisecond.
    while True:
        await asyncio.sleep(TRIM_SECONDS)
        with contextlib.suppress(RuntimeError):  # no thread could be started; the next round retries
            await asyncio.to_thread(release_freed_memory)


PAGE_THREADS = 2  # these threads only render templates, so that pages do not wait for the Markdown of other chats
STOP_SECONDS = 1.0  # time limit for stopped requests to end
ENGINE_EXIT_SECONDS = 3.0
DOWNLOAD_EXIT_SECONDS = 0.5
_NO_TRACES: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}


@dataclass(frozen=True, slots=True)
class Components:
    shared: SharedServices
    chat: ChatServices
    api: ApiServices
    leases: LeaseKeeper
    mcp: McpServers | None
    sign_in: SignInMethods
    batches: BatchRunner
    background: BackgroundResponses


def create_app(
    engine_source: EngineSource,
    settings: Settings | None = None,
    *,
    model_registry: ModelRegistry | None = None,
    plugins: Plugins | None = None,
) -> FastAPI:
    """Create the web application. Raises SettingsError or StorageError.

    Startup calls `engine_source` in a separate thread, and raises StorageError if the store cannot be opened.
    """
    settings = settings or Settings()
    parts = _create_components(engine_source, settings, model_registry, plugins or Plugins())
    trusted_proxies = [ipv4_network(proxy) for proxy in settings.trusted_proxies]
    tracing = configure_tracing()
    if tracing is not None:
        tracing.instrument(parts.shared.requests, parts.chat.turns)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        asyncio.get_running_loop().set_default_executor(WorkerThreads(thread_name_prefix="asyncio"))
        await asyncio.to_thread(parts.shared.plugins.start)
        await parts.shared.store.open()
        parts.shared.exchange.start()
        if parts.shared.accounts is not None:
            await parts.shared.accounts.start()
        parts.shared.engine.start(asyncio.get_running_loop())
        await parts.leases.start()  # this may resume answers, which wait until the engine is loaded
        if parts.mcp is not None:
            parts.mcp.start()
        parts.batches.start(app)
        parts.background.start(app, parts.api.inner_app)
        library = parts.chat.library
        jobs = (
            purge(parts.shared, parts.chat.turns),
            trim_memory_periodically(),
            library.run_parser(),
            library.watch_folder(),
        )
        background_tasks = [asyncio.create_task(each) for each in jobs]
        try:
            yield
        finally:
            for task in background_tasks:
                task.cancel()
            await asyncio.gather(*background_tasks, return_exceptions=True)  # also ends the child that parses documents
            await _shut_down(parts)

    app = FastAPI(
        title="notso",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        telemetry=tracing.config if tracing is not None else _NO_TRACES,
        middleware=[
            Middleware(PeerAddress),
            Middleware(ProxyHeadersMiddleware, trusted_hosts=trusted_proxies),
            Middleware(BasePath, configured=settings.base_path, trusted_proxies=trusted_proxies),
            Middleware(UnversionedPaths),
            Middleware(AccessLog),
            Middleware(ChunkedBodies),
            Middleware(RequestMetrics, metrics=parts.api.metrics),
            Middleware(SecurityHeaders),
            Middleware(ApiEdge),
            Middleware(UnexpectedErrors, kind=asyncio.CancelledError, handler=show_stopping),
            Middleware(PageLanguage),
            Middleware(StrictHttp),
            Middleware(HostGuard, names=settings.host_names),
            Middleware(CrossOriginAccess, rules=settings.allowed_origins),
            Middleware(OllamaGreeting),
            Middleware(CrossSiteGuard),
            Middleware(RateLimit, per_minute=settings.rate, counters=counters_at(settings.valkey_url)),
            Middleware(RequestLimits),
            Middleware(IdempotencyMiddleware, services=parts.api),
            Middleware(UnexpectedErrors, kind=Exception, handler=_show_internal_error),
        ],
    )
    app.state.parts = parts
    app.state.batches = parts.batches
    app.state.chat, app.state.api, app.state.forms = parts.chat, parts.api, parts.shared.forms
    app.state.key_ring, app.state.oidc = parts.sign_in.ring, parts.sign_in.oidc
    for router in (
        server_facts.health_router,
        server_facts.router,
        models.router,
        chat_completions.router,
        text_completions.router,
        llama_cpp.router,
        embeddings.router,
        anthropic_messages.router,
        responses.router,
        responses.stored_router,
        batch_files.router,
        vector_stores.router,
        batch_routes.router,
        ollama.router,
        ollama.discovery_router,
        tokens.router,
        models.adapters_router,
        openapi.router,
        openapi.reference_router,
        sign_in.router,
        sign_in.sessions,
        operator.router,
        model_pages.router,
        routes.router,
        messages.router,
        answer_tokens.router,
        chats.archive_router,
        chats.router,
        settings_routes.router,
        prompts.router,
        preview.router,
        documents.attachments_router,
        documents.router,
        projects.router,
        prompts.memory_router,
        tools.router,
        transfer.router,
        sharing.router,
        tools.plugins_router,
    ):
        include_marked(app, router)
    if settings.engine_api:
        engine_routes.mount(app, parts.api)
    app.add_exception_handler(ApiError, _show_api_error)
    for kind in (Problem, NotsoError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, _show_problem)
    app.add_exception_handler(ClientDisconnect, _handle_disconnect)
    app.add_exception_handler(Exception, _show_internal_error)  # for errors raised by middleware
    return app


async def drain_work(parts: Components, cause: str = "requested") -> None:
    """Finish or stop work in progress before shutdown; return when everything is saved."""
    logger.warning("the server is stopping: %s", cause)
    # Make /health fail first, so that a proxy stops sending requests while the server still admits them.
    parts.shared.leaving = True
    await asyncio.sleep(parts.shared.settings.leave_seconds)
    parts.shared.stopping = parts.leases.leaving = True
    await parts.batches.close()
    parts.chat.turns.interrupt_all(asking_only=True)  # another process can continue turns that wait for input
    try:
        async with asyncio.timeout(parts.shared.settings.drain_seconds):
            await _wait_for_all(parts)
    except TimeoutError:
        parts.chat.turns.interrupt_all()
        parts.shared.requests.stop_all()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await _wait_for_all(parts)
        except TimeoutError:  # the engine hangs, or a remote engine does not respond
            parts.shared.engine.close()
            await parts.chat.turns.wait_for_all()


async def _wait_for_all(parts: Components) -> None:
    await parts.shared.requests.wait_for_all()
    await parts.chat.turns.wait_for_all()


def _create_components(
    engine_source: EngineSource, settings: Settings, model_registry: ModelRegistry | None, plugins: Plugins
) -> Components:
    store = configure_store(settings)
    engine = EngineHost(engine_source, settings.keep_alive_seconds)
    requests = RunningRequests(engine, settings.max_waiting_turns)
    renderer = FairQueue("notso-render")
    assets = Assets()
    mcp = mcp_servers(settings.mcp_config, settings.mcp_allowed_http)
    pages = Pages(assets, FairQueue("notso-page", PAGE_THREADS), CommandView(plugins, mcp))
    turns = Turns(store, requests, renderer, settings.max_answer_characters, pages.card)
    metrics = Metrics(engine)
    requests.at_end.append(metrics.count_failure)
    suggestions, feed = Suggestions(requests, turns), Feed()
    mcp_sources: tuple[ToolSource, ...] = () if mcp is None else (mcp,)
    toolbox = Toolbox(PluginTools(plugins), *mcp_sources)
    turns.at_end.append(lambda turn, usage, finish_reason: metrics.observe(usage, finish_reason))
    ChatMarkNotifier(turns, store, feed)
    exchange = exchange_at(settings.valkey_url)
    # These counters are separate from RateLimit's. If both used one table, client addresses could fill it, and all
    # further addresses and keys would share one counter.
    counters = counters_at(settings.valkey_url)
    sign_in = sign_in_methods(settings, plugins, configure_access_store(settings, store), counters, exchange)
    requests.quotas = sign_in.accounts
    shared = SharedServices(
        settings, store, engine, requests, plugins, model_registry, sign_in.accounts, exchange=exchange
    )
    html_cache = HtmlCache(store, turns, renderer)
    chat = ChatServices(
        shared,
        turns,
        suggestions,
        renderer,
        assets,
        pages,
        html_cache,
        TurnRelay(shared.exchange, turns, feed, store),
        LibraryWorker(store, unconfined=settings.unconfined_documents, folder=settings.documents),
        feed,
        toolbox=toolbox,
        mcp=mcp,
    )
    titles, compaction = Titles(chat), Compaction(chat)
    turns.at_end.append(lambda turn, usage, finish_reason: titles.schedule_if_needed(turn))
    turns.at_end.append(lambda turn, usage, finish_reason: compaction.schedule_if_needed(turn))
    leases = shared.leases = LeaseKeeper(store, turns)
    leases.at_orphan.append(chat.relay.ended)
    leases.at_taken = _make_resume_callback(chat)
    background = BackgroundResponses(shared, sign_in.ring)
    api = ApiServices(shared, metrics, ResumableStreams(shared.exchange), background)
    return Components(shared, chat, api, leases, mcp, sign_in, BatchRunner(api, sign_in.ring), background)


def _make_resume_callback(chat: ChatServices) -> Callable[[Orphan], None]:
    tasks: set[asyncio.Task[None]] = set()

    def resume(orphan: Orphan) -> None:
        task = asyncio.create_task(resume_orphan(chat, orphan))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    return resume


async def _shut_down(parts: Components) -> None:
    parts.shared.stopping = parts.leases.leaving = True
    await parts.batches.close()
    await parts.background.close()
    parts.chat.turns.interrupt_all()
    parts.shared.engine.close()
    try:
        async with asyncio.timeout(ENGINE_EXIT_SECONDS):
            await parts.chat.turns.wait_for_all()
    except TimeoutError:
        logger.warning("the engine did not stop in time; saved data is not affected")
    if parts.mcp is not None:
        await parts.mcp.close()
    await parts.chat.relay.close()
    await parts.shared.exchange.close()
    await asyncio.to_thread(parts.shared.engine.join, ENGINE_EXIT_SECONDS)
    await asyncio.to_thread(parts.shared.plugins.close)
    await asyncio.to_thread(parts.chat.downloads.close, DOWNLOAD_EXIT_SECONDS)
    parts.leases.stop()
    await parts.shared.store.close()
    if parts.shared.accounts is not None:
        await parts.shared.accounts.close()
    parts.chat.renderer.close()
    parts.chat.pages.close()
    parts.shared.large_work.close()
    parts.shared.forms.close()
    parts.shared.documents.close()
    parts.chat.importing.close()
    parts.chat.previews.close()
    parts.chat.exporting.close()


async def _show_problem(request: Request, error: Exception) -> Response:
    if is_api(request.scope) and isinstance(error, (Problem, NotsoError)):
        return await _show_api_error(request, error)
    # The error is shown in place (for htmx requests), on the chat's page with the user's draft, or on an error page.
    problem = _to_problem(error)
    if problem.status == 500:
        logger.error("unexpected %s on a %s request", type(error).__name__, request.method, exc_info=error)
    problem.draft = problem.draft or getattr(error, "draft", "")
    headers = dict(getattr(error, "headers", None) or {})
    if problem.retry_after_seconds is not None:
        headers["Retry-After"] = str(problem.retry_after_seconds)
    if problem.status == 405:
        headers["Allow"] = ", ".join(_allowed_methods(request))
    services = chat_services(request)
    if is_api(request.scope):
        sentence = _key_problem(request) if problem.status == 401 else problem.sentence
        response: Response = PlainTextResponse(sentence, problem.status)  # ApiEdge converts it to the API's format
    elif problem.status == 401:
        response = await _require_sign_in(request)
    elif _reloads_failed_form(request, error):
        return RedirectResponse(_page_above(request), 303)
    elif is_fragment(request):
        response = await services.pages.respond(
            request,
            "_problem.html",
            problem.status,
            problem=problem.sentence,
            full=problem.full,
            moved=problem.moved,
            chat=request.path_params.get("chat_id"),
        )
    elif _expects_json(request, error):
        api_error = ApiError(problem.status, CODES.get(problem.status, "internal_error"), problem.sentence)
        response = JSONResponse(api_error.body, problem.status)
    elif problem.draft and (page := await _page_with_draft(request, services, problem)) is not None:
        response = page
    else:
        response = await services.pages.respond(
            request, "problem.html", problem.status, problem=problem.sentence, draft=problem.draft
        )
    response.headers.update(headers)
    return response


def _allowed_methods(request: Request) -> list[str]:
    # Starlette's Allow header lists only the methods of the first route with this path, but each method has its own
    # route.
    routes = (route for route in request.app.router.routes if route.matches(request.scope)[0] is not Match.NONE)
    return sorted({method for route in routes for method in getattr(route, "methods", None) or ()})


def _expects_json(request: Request, error: Exception) -> bool:
    # A client that requests an unknown path is probably an API client with a wrong base URL. It would show its user the
    # HTML of an error page.
    accept = request.headers.get("accept", "")
    return "text/html" not in accept and (isinstance(error, HTTPException) or "application/json" in accept)


def _reloads_failed_form(request: Request, error: Exception) -> bool:
    # Without JavaScript, the address bar shows the URL to which a failed form was sent. Opening that URL sends a GET
    # request, to which the server may respond with status 405.
    is_refused = isinstance(error, HTTPException) and error.status_code == 405
    is_typed = request.method == "GET" and "text/html" in request.headers.get("accept", "")
    return is_refused and is_typed and not is_fragment(request)


def _page_above(request: Request) -> str:
    parts = request.scope["path"].split("/")
    for end in (3, 2):  # such as /projects/ID, then /projects; longer paths return only parts of pages
        scope = {**request.scope, "path": "/".join(parts[:end])}
        if any(route.matches(scope)[0] is Match.FULL for route in request.app.router.routes):
            return str(scope["path"])
    return "/"


async def _page_with_draft(request: Request, services: ChatServices, problem: Problem) -> Response | None:
    page, chat_id = views.PageRequest(services, owner_of(request), request), request.path_params.get("chat_id")
    try:
        view = await read_shown(page, chat_id) if chat_id is not None else None
        return await views.render_chat_page(page, view, problem=problem)
    except (Problem, StorageError):  # the chat was deleted in the meantime, or cannot be read
        return None


async def _require_sign_in(request: Request) -> Response:
    if is_fragment(request):
        return Response(status_code=401, headers={"HX-Redirect": "/login"})
    if "text/html" in request.headers.get("accept", ""):
        return RedirectResponse("/login", 303)
    return PlainTextResponse(_key_problem(request) + "\n", 401)


def _key_problem(request: Request) -> str:
    return words["login_wrong" if any(keys_sent(request)) else "error_key"]


async def _handle_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=400)  # the client has disconnected and does not receive this response


async def _show_api_error(request: Request, error: Exception) -> Response:
    failure = api_error_of(error)
    if failure is not error:  # an engine error, which names the engine's fields
        failure = failure.called(getattr(request.state, "field_names", {}))
    retry_after = failure.retry_after_seconds
    headers = {"Retry-After": str(retry_after)} if retry_after is not None else None
    return JSONResponse(failure.body_for(request.scope), failure.status, headers)


async def _show_internal_error(request: Request, error: Exception) -> Response:
    if isinstance(error, BodyError):
        raise error
    if is_busy := is_thread_shortage(error):
        logger.warning("could not start a thread for a %s request: %s", request.method, error)
    else:
        logger.error("unexpected %s on a %s request", type(error).__name__, request.method, exc_info=error)
    if is_api(request.scope):
        return await _show_api_error(request, error)
    if is_busy:  # plain text, because rendering a page would also need a thread
        return PlainTextResponse(words["error_busy"], 503, {"Retry-After": "5"})
    return PlainTextResponse(words["error_inside"] + "\n", 500)


def _to_problem(error: Exception) -> Problem:
    match error:
        case Problem():
            return error
        case NotsoError():
            failure = api_error_of(error)
            return Problem(failure.status, translated(error), retry_after_seconds=failure.retry_after_seconds)
        case RequestValidationError():
            return Problem(400, words["error_form"])
        case HTTPException(status_code=405):
            return Problem(405, words["error_method"])
        case HTTPException(status_code=status):
            return Problem(status, words["error_unknown_page"])
        case _:
            return Problem(500, words["error_inside"])
