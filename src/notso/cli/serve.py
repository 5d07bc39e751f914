"""`notso serve`: serve the chat page and the API."""

from __future__ import annotations

import gc
import math
import threading
import webbrowser
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from notso.cli import config_file, engines, notices, options, terminal
from notso.cli.engines import model_file
from notso.cli.options import add_setting_options, settings_from
from notso.system.processes import make_undumpable
from notso.system.processors import has_display
from notso.text_file import is_unicode

if TYPE_CHECKING:
    from notso.smollm3.engine.engine import Engine
    from notso.smollm3.values.engine_config import EngineConfig

EXAMPLES = """\
  notso serve
  notso serve --model SmolLM3-Q4_K_M.gguf --port 8080 --no-browser"""


@add_setting_options
def serve(
    command_context: typer.Context,
    model: options.Model = None,
    fetch: options.Fetch = False,
    open_browser: Annotated[
        bool | None,
        typer.Option(
            "--open/--no-browser",
            help="Whether to open the page in a browser. Default: only if there is a display.",
            show_default=False,
        ),
    ] = None,
    context: options.Context = None,
    kv: options.KV = "auto",
    threads: options.Threads = None,
    device: options.Device = "auto",
    weights: options.Weights = "auto",
    chat_template_file: options.ChatTemplateFile = None,
    adapter: options.Adapters = None,
    max_num_seqs: options.MaxNumSeqs = None,
    cache_disk: options.CacheDisk = 4.0,
    library_disk: options.LibraryDisk = 20.0,
    api_key_file: options.ApiKeyFile = None,
    plugin: options.Plugins = None,
    sign_in: Annotated[
        Path | None,
        typer.Option("--sign-in", metavar="FILE", help="TOML file that configures authentication.", show_default=False),
    ] = None,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Show the value of each option and its source, and exit.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print startup information as JSON.")] = False,
    log_format: Annotated[
        Literal["text", "json"], options.env_option("--log-format", variable="NOTSO_LOG_FORMAT", help="Log format.")
    ] = "text",
    access_log: Annotated[
        bool,
        options.env_option(
            "--access-log/--no-access-log",
            variable="NOTSO_ACCESS_LOG",
            help="Log requests and generations to stderr.",
            show_default=True,
        ),
    ] = False,
    plain: options.Plain = False,
    debug: options.Debug = False,
    **setting_options: Any,
) -> None:
    """Serve the chat page and the API until Ctrl-C."""
    from notso.smollm3.values.engine_config import DOCUMENT_TOKENS, EngineConfig
    from notso.web.values.sign_in import SignInSettings, read_sign_in

    if show_config:
        terminal.print_lines(config_file.describe_config(command_context))
        return
    make_undumpable()
    if log_format == "json":
        notices.install_json()
    if access_log:
        notices.install_access_log()
    engine_url = setting_options["engine_url"] or None
    if engine_url:
        options.reject_engine_options(command_context)
    path = None if engine_url else model_file(model, silent=as_json, fetch=fetch)
    if path is not None and not is_unicode(path):  # pages and responses name the path
        raise typer.BadParameter(f"{path} is not valid UTF-8: rename the file or folder", param_hint="--model")
    plugin_choice = options.plugins(plugin)
    settings = settings_from(
        setting_options,
        sign_in_plugin=plugin_choice.sign_in,
        sign_in=read_sign_in(sign_in) if sign_in is not None else SignInSettings(),
        api_key=options.api_key(api_key_file),
        engine_key=options.engine_key() if setting_options["engine_api"] or engine_url else None,
    )
    config = EngineConfig(
        context_tokens=context,
        document_tokens=DOCUMENT_TOKENS,
        threads=threads,
        device=device,
        weights=weights,
        kv=kv,
        max_num_seqs=max_num_seqs,
        cache_dir=str(settings.directory / "kv") if cache_disk else None,
        cache_bytes=int(cache_disk * 10**9),
        library_bytes=int(library_disk * 10**9),
        adapters=tuple(adapter or ()),
        chat_template_file=None if chat_template_file is None else str(chat_template_file),
    )
    from notso.plugins.process import Plugins

    plugins = Plugins(plugin_choice.names)
    summary = front_end_summary(engine_url) if engine_url else startup_summary(path, config)
    if as_json:
        terminal.print_json({"event": "starting", **summary.facts})
    else:
        terminal.print_lines(summary.lines)
    gc.disable()  # until the server is ready: garbage collection would delay startup, which creates little garbage
    from notso.web.engine.models import ModelRegistry
    from notso.web.engine.port import EngineSource
    from notso.web.engine.remote.remote_engine import RemoteSource
    from notso.web.server import serve as run_server

    if not engine_url:
        engines.exit_on_lost_model_file()
    opens_browser = has_display() if open_browser is None else open_browser

    def load(model_file: Path | None, occupied_bytes: int | None = None) -> Engine:
        from notso.smollm3.engine.engine import Engine

        settings.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = None if model_file is None else str(model_file)
        engine_config = replace(config, model=name, beside_bytes=occupied_bytes)
        if model_file != path:  # --adapter and --chat-template-file apply only to the model given by --model
            engine_config = replace(engine_config, adapters=(), chat_template_file=None)
        return Engine.load(engine_config, find_processor=plugins.logits_processor)

    def ready(address: str) -> None:
        gc.freeze()  # most objects created at startup are never freed, so the collector need not visit them
        gc.enable()
        if as_json:
            terminal.print_json({"event": "open", "url": address})
        else:
            terminal.print_line(f"open     {address} (Ctrl-C stops)")
        if opens_browser:
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()

    folder = path.parent if model is not None and path is not None else None
    model_registry: ModelRegistry | None = ModelRegistry(load, folder, load_beside=load, check=engines.check_model)
    source: EngineSource = partial(load, path)
    if settings.engine_url is not None:
        source, model_registry = RemoteSource(settings.engine_url, settings.engine_key or ""), None
    try:
        run_server(source, settings, model_registry=model_registry, plugins=plugins, on_ready=ready)
    finally:
        gc.enable()


class StartupSummary(NamedTuple):
    """Startup information: text lines, or `facts` for --json."""

    lines: list[str]
    facts: dict[str, Any]


def front_end_summary(engine_url: str) -> StartupSummary:
    line = f"engine   {engine_url} runs the model; this server is its front end"
    return StartupSummary([line], {"engine": engine_url})


def startup_summary(path: Path | None, config: EngineConfig) -> StartupSummary:
    """Plan memory, choose the device, and describe both. Raises NotsoError."""
    from notso.smollm3.hub import registry as hub

    # Plan here, so that a damaged file or insufficient memory is reported before the server starts to listen.
    plan, device, note = engines.plan_model(path or hub.demo_path(), config)
    if path is None:
        model = ["model    built-in demo model: tiny, for trying out the interface", recommend_model()]
    else:
        model = [f"model    {path.name} ({terminal.gigabytes(path.stat().st_size)}) in {path.parent}"]
    is_maximum = config.context_tokens is not None and plan.context_tokens < config.context_tokens
    reduced = " (the maximum of this model)" if is_maximum else " (reduced to fit)" if plan.reduced else ""
    if plan.document_tokens > plan.context_tokens:
        reduced += f" ({plan.document_tokens:,} with documents)"
    lines = [
        *model,
        f"memory   {terminal.gigabytes(plan.needed_bytes)} of {terminal.gigabytes(plan.limit.available_bytes)} "
        f"({plan.limit.source}), context {plan.context_tokens:,} tokens{reduced}, "
        f"KV cache {plan.kv_format}",
        f"device   {device}{f' (the GPU is not used: {note})' if note else ''}",
    ]
    facts = {
        "model": str(path or hub.demo_path()),
        "is_demo": path is None,
        "needed_bytes": plan.needed_bytes,
        "available_bytes": plan.limit.available_bytes,
        "context_tokens": plan.context_tokens,
        "document_tokens": plan.document_tokens,
        "reduced": plan.reduced,
        "kv": str(plan.kv_format),
        "device": str(device),
    }
    return StartupSummary(lines, facts)


def recommend_model() -> str:
    from notso.smollm3.hub import registry as hub
    from notso.smollm3.hub.download import plan_download

    official = hub.official_files()[0]
    plan = plan_download(official)
    minutes = math.ceil(8 * official.size_bytes / 100e6 / 60)
    size, free = terminal.gigabytes(official.size_bytes), terminal.gigabytes(plan.free_bytes)
    return (
        f"better   SmolLM3-3B: download it with `notso pull` or on the Models page ({size}, {minutes} minutes at "
        f"100 Mbit/s, to {plan.folder}, {free} free)"
    )
