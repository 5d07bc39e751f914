"""`notso serve`: the chat page and the API."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from notso.cli import options, terminal

if TYPE_CHECKING:
    from notso.smollm3.engine import Engine

EXAMPLES = """\
  notso serve
  notso serve --model SmolLM3-Q4_K_M.gguf --port 8080 --no-browser"""


def serve(
    model: options.Model = None,
    host: Annotated[str, typer.Option("--host", envvar="NOTSO_HOST", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", "-p", envvar="NOTSO_PORT", min=0, max=65535, help="Port; 0 takes a free one.")
    ] = 3000,
    open_browser: Annotated[
        bool | None,
        typer.Option(
            "--open/--no-browser", help="Open the page. Default: where there is a display.", show_default=False
        ),
    ] = None,
    context: options.Context = None,
    threads: options.Threads = None,
    data_dir: Annotated[
        Path | None,
        typer.Option("--data-dir", envvar="NOTSO_DATA_DIR", metavar="FOLDER", help="Where conversations are kept."),
    ] = None,
    plain: options.Plain = False,
    debug: options.Debug = False,
) -> None:
    """Serve the chat page and the API on this machine, until Ctrl-C."""
    from notso.smollm3.hub import resolve_model
    from notso.web.settings import Settings

    path = resolve_model(model)
    settings = Settings(host=host, port=port, data_dir=data_dir, api_key=os.environ.get("NOTSO_API_KEY") or None)
    _announce(path, settings.host, settings.port)
    from notso.web.server import serve as run_server

    def load() -> Engine:
        from notso.smollm3.engine import Engine

        return Engine.load(path, context_tokens=context, threads=threads)

    run_server(load, settings)


def has_display() -> bool:
    """Whether a browser opened here would be seen by the person at the keyboard."""
    if sys.platform == "darwin":
        return "SSH_CONNECTION" not in os.environ
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _announce(path: Path | None, host: str, port: int) -> None:
    terminal.say(f"notso on http://{host}:{port}")
