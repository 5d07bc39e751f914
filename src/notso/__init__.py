"""Run SmolLM3-3B from its GGUF file: quantised blocks multiplied as they are, a chat page, an OpenAI-style API.

>>> from notso import Engine, Message, SamplingParams
>>> engine = Engine.load()  # the demo model; or a path to a GGUF file
>>> for event in engine.generate([Message("user", "hello")], SamplingParams(max_tokens=64)):
...     print(event.text, end="")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from notso.smollm3 import (
        Engine,
        Event,
        Grammar,
        Message,
        RequestOptions,
        SamplingParams,
        TokenLogprob,
        Tool,
        ToolCall,
        ToolName,
        Usage,
    )

    __version__: str

__all__ = [
    "Engine",
    "Event",
    "Grammar",
    "Message",
    "RequestOptions",
    "SamplingParams",
    "TokenLogprob",
    "Tool",
    "ToolCall",
    "ToolName",
    "Usage",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("notso-smollm3-bot")
    # Loaded when first asked for, so that `notso --help` need not wait for numpy and the kernels.
    if name in __all__:
        import notso.smollm3

        return getattr(notso.smollm3, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
