"""Types of the plugin API. The functions that they contain run in the plugin's own process.

A function may raise Refused. Any other exception disables the plugin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Rows = Callable[[NDArray[np.int32], NDArray[np.float32]], NDArray[np.float32]]


class Refused(Exception):
    """Raise to refuse a request, with a message for the user or the model."""


@dataclass(frozen=True, slots=True)
class CalledIn:
    """The chat in which a tool is called."""

    owner: str
    chat_id: str
    attachments: Mapping[str, str] = field(default_factory=dict)  # file name -> text


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the model may call once the user has enabled it."""

    name: str
    description: str
    parameters: Mapping[str, Any]  # JSON schema of the arguments
    run: Callable[[Mapping[str, Any], CalledIn], str]  # returns text for the model
    seconds: float = 10.0  # time limit, after which the plugin is disabled; at most 60


@dataclass(frozen=True, slots=True)
class LogitsProcessor:
    """Changes logits before the grammar mask, penalties and sampling are applied."""

    name: str
    does: str
    # Called with two arrays: the tokens of prompt and answer, int32 (L,), and the logits, float32 (V,), which may be
    # modified. Returns logits, float32 (V,), each finite or -inf. The result must depend only on the arguments;
    # otherwise, a seed does not reproduce an answer.
    process: Rows


@dataclass(frozen=True, slots=True)
class SlashCommand:
    """A slash command for the chat page."""

    name: str
    usage: str
    does: str
    run: Callable[[str], str]  # called with the text after the name; returns text to show


@dataclass(frozen=True, slots=True)
class PageRequest:
    """A GET or POST request to a page of the plugin."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    form: Mapping[str, str] = field(default_factory=dict)
    owner: str = ""


@dataclass(frozen=True, slots=True)
class PageResponse:
    """A response of at most 2**20 characters. The page cannot run scripts or load anything from other hosts."""

    body: str
    media_type: str = "text/html"
    status: int = 200


@dataclass(frozen=True, slots=True)
class Page:
    """A page at /plugins/NAME/pages/PATH."""

    path: str
    title: str  # text of the page's link in the settings
    show: Callable[[PageRequest], PageResponse | str]


@dataclass(frozen=True, slots=True)
class SignInRequest:
    """An HTTP request that a sign-in plugin authenticates."""

    address: str  # address of the client
    headers: Mapping[str, str] = field(default_factory=dict)  # the names are in lower case


@dataclass(frozen=True, slots=True)
class Plugin:
    """Everything that a plugin provides."""

    tools: tuple[Tool, ...] = ()
    logits_processors: tuple[LogitsProcessor, ...] = ()
    slash_commands: tuple[SlashCommand, ...] = ()
    pages: tuple[Page, ...] = ()
    sign_in: Callable[[SignInRequest], str | None] | None = None  # returns the user's name, or None if unknown
