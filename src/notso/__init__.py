"""Run SmolLM3-3B from its GGUF file: quantised blocks multiplied as they are, a chat page, an OpenAI-style API.

>>> from notso import Engine
>>> engine = Engine.load()  # the demo model; or a GGUF file, a name of `notso list`, or a Hugging Face folder
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
    # Loaded when first asked for, so that `notso --help` need not wait for numpy and the kernels.
    if name in ("AsyncAnswerStream", "AsyncEngine"):
        import notso.async_engine

        return getattr(notso.async_engine, name)
    if name in __all__:
        import notso.smollm3

        return getattr(notso.smollm3, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
