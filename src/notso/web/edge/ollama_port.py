"""What differs on the port for Ollama's clients: its greeting, and the origins that Ollama allows by default."""

from __future__ import annotations

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

GREETING = "Ollama is running"
"""Response to `GET /`, which clients compare."""

HOSTS = ("localhost", "127.0.0.1", "0.0.0.0")
DEFAULT_ORIGINS = (
    *(f"{scheme}://{host}:*" for scheme in ("http", "https") for host in HOSTS),
    *(f"{scheme}://*" for scheme in ("app", "file", "tauri", "vscode-webview", "vscode-file")),
)
"""Ollama's own defaults: pages of this machine, and desktop programs."""


def is_ollama_port(scope: Scope) -> bool:
    """Return whether a request arrived at `--ollama-port`."""
    port = getattr(scope["app"].state, "ollama_port", None) if "app" in scope else None
    return port is not None and bool(scope.get("server")) and scope["server"][1] == port


class OllamaGreeting:
    """Answers `GET /` and `HEAD /` on Ollama's port, where the page would be otherwise. Reveals nothing, so no key is
    required, as with Ollama."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_root = scope["type"] == "http" and scope["path"] == "/" and scope["method"] in ("GET", "HEAD")
        app = PlainTextResponse(GREETING) if is_root and is_ollama_port(scope) else self._app
        await app(scope, receive, send)
