"""Floor 2: SmolLM3 and how it is run. The names below are what the floors above may use."""

from notso.smollm3.download import DownloadPlan, is_offline, plan_download, pull
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
from notso.smollm3.hub import KnownFile, LocalModel, local_models, official_files
from notso.smollm3.memory import ProcessMemory, process_memory
from notso.smollm3.messages import (
    EngineStats,
    Event,
    EventKind,
    FinishReason,
    MemoryBudget,
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
    "DownloadPlan",
    "Engine",
    "EngineError",
    "EngineStats",
    "Event",
    "EventKind",
    "FinishReason",
    "InvalidRequestError",
    "KnownFile",
    "LocalModel",
    "MemoryBudget",
    "Message",
    "ModelError",
    "ModelFileError",
    "ModelInfo",
    "NotsoError",
    "OutOfMemoryError",
    "Priority",
    "ProcessMemory",
    "Progress",
    "PromptEstimate",
    "Role",
    "SamplingParams",
    "TemplateError",
    "Tool",
    "ToolCall",
    "Usage",
    "WhenFull",
    "is_offline",
    "local_models",
    "official_files",
    "plan_download",
    "process_memory",
    "pull",
]
