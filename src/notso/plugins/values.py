"""What a plugin gives: plain values with functions in them. All of it runs in the plugin's own process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Rows = Callable[[NDArray[np.int32], NDArray[np.float32]], NDArray[np.float32]]


class Refused(Exception):
    """What was asked cannot be done; whoever asked reads the sentence. Any other error of a plugin switches it off."""


@dataclass(frozen=True, slots=True)
class CalledIn:
    """Where a tool is called: whose chat, which one, and the texts of the files that belong to it, by their names."""

    owner: str
    chat_id: str
    attachments: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the model may call once a person has switched it on. `parameters` is the JSON schema of the
    arguments; `run` gives the text that the model reads. After `seconds` (at most 60) the plugin counts as hanging."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    run: Callable[[Mapping[str, Any], CalledIn], str]
    seconds: float = 10.0


@dataclass(frozen=True, slots=True)
class LogitsProcessor:
    """Changes the logits of one row before grammar, penalties and sampling. `process` is given the tokens of prompt and
    answer so far, int32 (L,), and the logits, float32 (V,), which it may write to; it returns float32 (V,): finite, or
    minus infinity for a token that must not come. It must follow from these two alone: then the same seed gives the
    same answer."""

    name: str
    does: str
    process: Rows


@dataclass(frozen=True, slots=True)
class SlashCommand:
    """A command of the page. `run` is given what was typed behind the name and returns what is shown."""

    name: str
    usage: str
    does: str
    run: Callable[[str], str]


@dataclass(frozen=True, slots=True)
class PageRequest:
    """What a page is asked: GET or POST, the address below the plugin's own, what stands behind '?', what a form sent,
    and whose page it is."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    form: Mapping[str, str] = field(default_factory=dict)
    owner: str = ""


@dataclass(frozen=True, slots=True)
class PageResponse:
    """What is shown: at most 1 MiB. A content policy holds for it: no scripts, no other hosts."""

    body: str
    media_type: str = "text/html"
    status: int = 200


@dataclass(frozen=True, slots=True)
class Page:
    """A page at /plugins/NAME/PATH. `title` is what links to it from the settings."""

    path: str
    title: str
    show: Callable[[PageRequest], PageResponse | str]


@dataclass(frozen=True, slots=True)
class SignInRequest:
    """What a request shows of who sent it. `headers` by lower-case names; `address` is the other end's."""

    address: str
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plugin:
    """All that one gives. `sign_in` names who sent a request (None: it does not know)."""

    tools: tuple[Tool, ...] = ()
    logits_processors: tuple[LogitsProcessor, ...] = ()
    slash_commands: tuple[SlashCommand, ...] = ()
    pages: tuple[Page, ...] = ()
    sign_in: Callable[[SignInRequest], str | None] | None = None
