"""Floor 2: SmolLM3 and how it is run. The names below are what the floors above may use."""

from notso.smollm3.engine import Engine
from notso.smollm3.errors import (
    ContextLengthError,
    DownloadError,
    EngineError,
    InvalidRequestError,
    ModelError,
    ModelFileError,
    NotsoError,
    OutOfMemoryError,
    TemplateError,
)
from notso.smollm3.messages import (
    EngineStats,
    Event,
    EventKind,
    FinishReason,
    Message,
    ModelInfo,
    Priority,
    Progress,
    PromptEstimate,
    Role,
    Tool,
    ToolCall,
    Usage,
    WhenFull,
)
from notso.smollm3.sampling_params import SamplingParams

__all__ = [
    "ContextLengthError",
    "DownloadError",
    "Engine",
    "EngineError",
    "EngineStats",
    "Event",
    "EventKind",
    "FinishReason",
    "InvalidRequestError",
    "Message",
    "ModelError",
    "ModelFileError",
    "ModelInfo",
    "NotsoError",
    "OutOfMemoryError",
    "Priority",
    "Progress",
    "PromptEstimate",
    "Role",
    "SamplingParams",
    "TemplateError",
    "Tool",
    "ToolCall",
    "Usage",
    "WhenFull",
]
