"""Inference engine for SmolLM3-3B in GGUF files, with a chat page and APIs.

>>> from notso import Engine
>>> engine = Engine.load()  # the demo model; or pass a GGUF file, a name from `notso list`, or a Hugging Face folder
>>> print(engine.chat("What is 27 + 48?", max_tokens=200).text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from notso.async_engine import AsyncAnswerStream, AsyncEngine
    from notso.smollm3 import (
        AnswerSettings,
        AnswerStream,
        Completion,
        ContextLengthError,
        Engine,
        EngineConfig,
        EngineError,
        Event,
        FixedPrefix,
        Generation,
        Grammar,
        InvalidRequestError,
        Message,
        ModelFileError,
        ModelInfo,
        NotsoError,
        QuoteSource,
        RequestOptions,
        SamplingParams,
        TemplateError,
        TokenLogprob,
        Tool,
        ToolCall,
        ToolName,
        UnknownOptionError,
        Usage,
    )

    __version__: str

__all__ = [
    "AnswerSettings",
    "AnswerStream",
    "AsyncAnswerStream",
    "AsyncEngine",
    "Completion",
    "ContextLengthError",
    "Engine",
    "EngineConfig",
    "EngineError",
    "Event",
    "FixedPrefix",
    "Generation",
    "Grammar",
    "InvalidRequestError",
    "Message",
    "ModelFileError",
    "ModelInfo",
    "NotsoError",
    "QuoteSource",
    "RequestOptions",
    "SamplingParams",
    "TemplateError",
    "TokenLogprob",
    "Tool",
    "ToolCall",
    "ToolName",
    "UnknownOptionError",
    "Usage",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("notso-smollm3-bot")
    # Names are imported on first access, so that `notso --help` does not load numpy or the kernels.
    if name in ("AsyncAnswerStream", "AsyncEngine"):
        import notso.async_engine

        return getattr(notso.async_engine, name)
    if name in __all__:
        import notso.smollm3

        return getattr(notso.smollm3, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
