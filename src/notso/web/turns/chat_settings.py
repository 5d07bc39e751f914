"""Validate chat settings, and merge an owner's defaults with a chat's overrides."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from notso.smollm3 import PARAMETERS, OnPage, Parameter, SamplingParams, WhenFull
from notso.web.store.protocol import Chat, ChatDefaults, SettingValue
from notso.web.values.wording import localize_number, number, words

MAX_SYSTEM_PROMPT_CHARACTERS = 20_000
MAX_TOOL_NAMES_CHARACTERS = 4_000
MAX_MODEL_NAME_CHARACTERS = 200
CHOICES = {
    "when_full": ("stop", "drop_oldest"),
    "compaction": ("ask", "automatic", "off"),
    "suggestions": ("on", "off"),
    "keep_thinking": ("off", "on"),
    "raw_user_messages": ("on", "off"),
    "titles": ("off", "on"),
    "speculative_prefill": ("on", "off"),
    "memory": ("on", "off"),
}
"""Settings that the page shows as lists of choices."""
NUMERIC = sorted(
    (each for each in PARAMETERS.values() if each.page), key=lambda each: each.page.place if each.page else 0
)
"""Sampling parameters that the page shows as input fields."""
MEMORY_HEADING = "The user wants you to remember:"
NO_LIMIT = "none"
"""Means "no limit" as the value of an integer setting, even if the default sets one, and "no tools" for `tools`."""
_CAN_BE_NONE = frozenset((*(each.name for each in NUMERIC if each.kind is int), "tools"))


@dataclass(frozen=True, slots=True)
class ChatSettings:
    system_prompt: str = ""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    suggestions: bool = True  # offer follow-up questions while the engine is idle
    keep_thinking: bool = False  # keep earlier reasoning in the prompt
    raw_user_messages: bool = True  # show user messages as typed
    titles: bool = False  # let the model name new chats
    speculative_prefill: bool = True  # while the engine is idle, prefill the message that is being typed
    memory: bool = True  # insert the owner's memory (facts to remember) into prompts
    when_full: WhenFull = "stop"
    compaction: Literal["off", "ask", "automatic"] = "ask"  # near the context limit, summarize the chat
    tools: str | None = None  # names separated by spaces
    model: str | None = None  # None: the default model

    @property
    def tool_names(self) -> list[str]:
        return (self.tools or "").split()


_OTHERS = tuple(each.name for each in fields(ChatSettings) if each.name not in ("system_prompt", "sampling"))
SETTING_NAMES = ("system_prompt", *(each.name for each in NUMERIC), *_OTHERS)


def merge_settings(*layers: Mapping[str, SettingValue]) -> ChatSettings:
    """Merge the layers over the defaults; later layers override earlier ones."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            if name in SETTING_NAMES:
                merged[name] = None if value == NO_LIMIT and name in _CAN_BE_NONE else value
    sampling = {each.name: merged.pop(each.name) for each in NUMERIC if each.name in merged}
    return ChatSettings(**merged, sampling=SamplingParams(**sampling, given=tuple(sampling)))


def effective_settings(base: ChatDefaults, chat: Chat) -> ChatSettings:
    """Return the settings for a chat's prompts, with the owner's memory before the system prompt.

    A temporary chat has no memory.
    """
    settings = merge_settings(base.defaults, chat.settings)
    if not base.memories or not settings.memory or chat.temporary:
        return settings
    memory = "\n".join([MEMORY_HEADING, *(f"- {text}" for text in base.memories)])
    return replace(settings, system_prompt="\n\n".join(filter(None, (memory, settings.system_prompt.strip()))))


def updated_settings(
    settings: Mapping[str, SettingValue], form: Mapping[str, str]
) -> tuple[dict[str, SettingValue], dict[str, str]]:
    """Return the settings updated from a form, and the reasons for rejected fields.

    Missing and unchanged fields keep their value; empty ones are reset.
    """
    result, problems = dict(settings), {}
    for name in SETTING_NAMES:
        if not is_changed(name, form):
            continue
        text = form[name] if name == "system_prompt" else form[name].strip()
        if not text.strip():
            result.pop(name, None)
            continue
        try:
            result[name] = _READERS[name](text)
        except ValueError as error:
            problems[name] = str(error)
    return result, problems


def is_changed(name: str, form: Mapping[str, str]) -> bool:
    """Return whether a form changes a field (see `form_digests`)."""
    # A form may have been open for a long time. Skipping its unchanged fields keeps changes made in another tab.
    return name in form and _digest(name, form[name]) not in form.get("was", "").split()


def form_digests(values: Mapping[str, str], defaults: Mapping[str, str]) -> str:
    """Return the value of the form field `was`: digests of the initial values."""
    shown = list(values.items())
    # A choice without a value shows its default.
    shown += [(name, defaults[name]) for name in CHOICES if not values[name]]
    return " ".join(_digest(name, value) for name, value in shown)


def _digest(name: str, value: str) -> str:
    return hashlib.sha256(f"{name}={value}".encode()).hexdigest()[:16]


def form_values(settings: Mapping[str, SettingValue]) -> dict[str, str]:
    return {name: _text(settings[name]) if name in settings else "" for name in SETTING_NAMES}


def form_defaults(settings: ChatSettings, of_model: Mapping[str, float] | None = None) -> dict[str, str]:
    """Return the values that apply to empty fields. `of_model` has the defaults of the model file."""
    sampling = settings.sampling.with_defaults(of_model or {})
    numbers = {each.name: _text(getattr(sampling, each.name)) for each in NUMERIC}
    return numbers | {name: _text(getattr(settings, name)) for name in ("system_prompt", *_OTHERS)}


def _text(value: SettingValue | None) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return localize_number(f"{value:g}")
    return "" if value is None else str(value)


def _numeric(parameter: Parameter, page: OnPage) -> Callable[[str], float | int | str]:
    low = parameter.low if page.low is None else page.low
    high = parameter.high if page.high is None else page.high

    def read_number(text: str) -> float:
        sentence = words["refused_above"] if parameter.above else words["refused_number"]
        reason = sentence.format(low=localize_number(f"{low:g}"), high=localize_number(f"{high:g}"))
        try:
            value = float(text.replace(",", "."))
        except ValueError:
            raise ValueError(reason) from None
        if not low <= value <= high or (parameter.above and value == low):  # also rejects NaN
            raise ValueError(reason)
        return value

    def read_integer(text: str) -> int | str:
        if text.lower() == NO_LIMIT:
            return NO_LIMIT
        digits = text.removeprefix("-").replace(",", "")
        is_integer = len(digits) <= 20 and digits.isascii() and digits.isdecimal()
        if not is_integer or not low <= int(text.replace(",", "")) <= high:
            raise ValueError(words["refused_integer"].format(low=number(low), high=number(high)))
        return int(text.replace(",", ""))

    return read_integer if parameter.kind is int else read_number


def _one_of(*choices: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(words["refused_choice"].format(choices=words["comma"].join(choices)))
        return text

    return read


def _switch(text: str) -> bool:
    return _one_of("on", "off")(text) == "on"


def _system_prompt(text: str) -> str:
    if len(text) > MAX_SYSTEM_PROMPT_CHARACTERS:
        raise ValueError(
            words["refused_length"].format(length=number(len(text)), limit=number(MAX_SYSTEM_PROMPT_CHARACTERS))
        )
    return text


def _tool_names(text: str) -> str:
    names = text.split()
    are_valid = all(character.isalnum() or character in "_-." for name in names for character in name)
    if len(text) > MAX_TOOL_NAMES_CHARACTERS or not are_valid:
        raise ValueError(words["refused_tools"])
    return " ".join(dict.fromkeys(names))


def _model(text: str) -> str:
    if len(text) > MAX_MODEL_NAME_CHARACTERS or not text.isprintable():
        raise ValueError(words["refused_length"].format(length=len(text), limit=MAX_MODEL_NAME_CHARACTERS))
    return text


_READERS: dict[str, Callable[[str], SettingValue]] = {
    "system_prompt": _system_prompt,
    **{each.name: _numeric(each, each.page) for each in NUMERIC if each.page},
    **{name: _switch if "on" in choices else _one_of(*choices) for name, choices in CHOICES.items()},
    "tools": _tool_names,
    "model": _model,
}


_ALLOWED = "tools_allowed"
"""Chat setting with the tools that the user always allows in this chat, as `name=digest`. `digest` is the digest of the
tool's definition, so that a changed tool needs permission again. Imports ignore this setting."""


def allowed_digests(chat: Chat | None) -> set[str]:
    return set(_permissions(chat.settings).values()) if chat is not None else set()


def with_tools(
    settings: Mapping[str, SettingValue], names: Iterable[str], *, ask_again: bool = False
) -> dict[str, SettingValue]:
    """Return settings with only the tools `names` enabled. Permissions for other tools, or for all tools if
    `ask_again`, are removed."""
    enabled = list(names)
    kept = {} if ask_again else {name: each for name, each in _permissions(settings).items() if name in enabled}
    return _with_permissions(settings, kept) | {"tools": " ".join(enabled) or NO_LIMIT}


def with_permission(settings: Mapping[str, SettingValue], tool: str, digest: str) -> dict[str, SettingValue]:
    return _with_permissions(settings, _permissions(settings) | {tool: digest})


def with_permissions_of(
    other: Mapping[str, SettingValue], settings: Mapping[str, SettingValue]
) -> dict[str, SettingValue]:
    return _with_permissions(settings, _permissions(other))


def without_permissions(settings: Mapping[str, SettingValue]) -> dict[str, SettingValue]:
    return {name: value for name, value in settings.items() if name != _ALLOWED}


def _permissions(settings: Mapping[str, SettingValue]) -> dict[str, str]:
    pairs = (each.rpartition("=") for each in str(settings.get(_ALLOWED, "")).split())
    # Permissions stored by older releases have no digest and are ignored, so permission is requested again.
    return {name: digest for name, _, digest in pairs if name}


def _with_permissions(settings: Mapping[str, SettingValue], permissions: Mapping[str, str]) -> dict[str, SettingValue]:
    allowed = " ".join(map("=".join, sorted(permissions.items())))
    return without_permissions(settings) | ({_ALLOWED: allowed} if allowed else {})
