"""The error tree of the model's floor.

NotsoError
└── ModelError
    ├── ModelFileError           this GGUF is not a SmolLM3 we can run
    ├── TemplateError            the chat template failed or refused the messages
    ├── InvalidRequestError      a parameter or message is out of range; `param` names it
    │   └── ContextLengthError   the prompt and a first token do not fit the context
    ├── OutOfMemoryError         the plan needs more memory than there is
    ├── EngineError              the engine failed on this answer
    └── DownloadError            a model could not be fetched or does not match its published hash
"""

from __future__ import annotations

from notso.qtensor import NotsoError as NotsoError
from notso.qtensor import one_line as one_line
from notso.qtensor import quoted as quoted


class ModelError(NotsoError):
    """Something about the model or a request to it."""


class ModelFileError(ModelError):
    """A GGUF file is readable but is not a SmolLM3 this engine can run; the message names the key or tensor."""


class TemplateError(ModelError):
    """The chat template could not be compiled or refused these messages."""


class InvalidRequestError(ModelError, ValueError):
    """A request asks for something outside what is supported. `param` is the name of the offending field."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(InvalidRequestError):
    """`needed_tokens` do not fit into `context_tokens`. `at_least`: it was too long to be counted.

    Programs that shorten conversations look for the message's first words.
    """

    def __init__(self, needed_tokens: int, context_tokens: int, *, at_least: bool = False) -> None:
        needed = f"at least {needed_tokens:,}" if at_least else f"{needed_tokens:,}"
        super().__init__(
            f"prompt is too long: this needs {needed} tokens, the context holds {context_tokens:,}", param="messages"
        )
        self.needed_tokens = needed_tokens
        self.context_tokens = context_tokens
        self.at_least = at_least


class OutOfMemoryError(ModelError):
    """A memory plan does not fit. Sizes in bytes."""

    def __init__(self, message: str, *, needed_bytes: int, available_bytes: int) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


class EngineError(ModelError):
    """The engine failed while answering (a non-finite logit, say). Other requests are unaffected."""


class DownloadError(ModelError):
    """A download failed, was cut, or does not match its published size or SHA-256."""
