"""Floor 2: SmolLM3 and how it is run. The names below are what the floors above may use."""

from notso.smollm3.engine.engine import Engine
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
from notso.smollm3.host_memory import ProcessMemory, process_memory
from notso.smollm3.hub.download import DownloadPlan, is_offline, plan_download, pull
from notso.smollm3.hub.registry import KnownFile, LocalModel, local_models, official_files
from notso.smollm3.values.events import Event, EventKind, FinishReason, Progress, TokenLogprob, Usage
from notso.smollm3.values.messages import Message, Priority, Role, Tool, ToolCall, WhenFull, thinking_set_by
from notso.smollm3.values.model_info import EngineStats, MemoryBudget, ModelInfo, PromptEstimate
from notso.smollm3.values.request_options import (
    AnswerOptions,
    CompleteOptions,
    Grammar,
    GrammarKind,
    PromptInput,
    ToolChoice,
    ToolName,
)
from notso.smollm3.values.sampling_params import SamplingParams

__all__ = [
    "AnswerOptions",
    "CompleteOptions",
    "ContextLengthError",
    "DownloadError",
    "DownloadPlan",
    "Engine",
    "EngineError",
    "EngineStats",
    "Event",
    "EventKind",
    "FinishReason",
    "Grammar",
    "GrammarKind",
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
    "PromptInput",
    "Role",
    "SamplingParams",
    "TemplateError",
    "TokenLogprob",
    "Tool",
    "ToolCall",
    "ToolChoice",
    "ToolName",
    "Usage",
    "WhenFull",
    "is_offline",
    "local_models",
    "official_files",
    "plan_download",
    "process_memory",
    "pull",
    "thinking_set_by",
]
