"""The fields of a chat completion's body, as the OpenAI API spells them: strict types, nothing unknown, every length
bounded. What cannot be honoured has no field here, so it is refused by its name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_MESSAGES = 2048
MAX_TOOLS = 128
MAX_PARTS = 256
MAX_CHOICES = 64

Text = Annotated[str, Field(max_length=1 << 20)]
Name = Annotated[str, Field(min_length=1, max_length=256)]


class Fields(BaseModel):
    """Strict: no field beyond those listed, and no value of another type, a boolean for a number least of all."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)


class TextPart(Fields):
    """A piece of a message's content. Pictures and sound have no type here: the model reads text."""

    type: Literal["text"]
    text: Text


Content = Text | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS)]


class SystemMessage(Fields):
    """What the model is told beforehand; `developer` is the newer name for the same."""

    role: Literal["system", "developer"]
    content: Content


class UserMessage(Fields):
    """What a person says."""

    role: Literal["user"]
    content: Content


class CalledFunction(Fields):
    """A past call: `arguments` is JSON text, as the answer had it."""

    name: Name
    arguments: Text


class Call(Fields):
    """A past tool call. `index` is there when a program sends back what it collected from a stream."""

    id: Name
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Annotated[int, Field(ge=0, le=MAX_TOOLS)] | None = None


class AssistantMessage(Fields):
    """An earlier answer, as programs send it back. As the last message it is an answer to be continued."""

    role: Literal["assistant"]
    content: Content | None = None
    reasoning_content: Text | None = None
    tool_calls: Annotated[list[Call], Field(max_length=MAX_TOOLS)] | None = None
    # What client libraries copy from an answer without a meaning for us.
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


class ToolMessage(Fields):
    """What a tool returned. Its name is known by the call's id."""

    role: Literal["tool"]
    content: Content
    tool_call_id: Name
    name: Name | None = None


AnyMessage = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class Function(Fields):
    """A function the model may call; `parameters` is a JSON schema, shown to the model as it is."""

    name: Name
    description: Annotated[str, Field(max_length=65_536)] | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None


class ToolEntry(Fields):
    """One tool. Only functions exist."""

    type: Literal["function"]
    function: Function


class StreamOptions(Fields):
    """What a stream holds beside the answer."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class TextFormat(Fields):
    """The only format there is so far."""

    type: Literal["text"]


class TemplateOptions(Fields):
    """Of the chat template's variables this one may be set; the others are the server's business."""

    enable_thinking: bool | None = None


class ChatFields(Fields):
    """The body of POST /v1/chat/completions. Ranges of the sampler's numbers are the engine's to check."""

    messages: Annotated[list[AnyMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    model: Name | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    stop: Text | list[Text] | None = None
    seed: int | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], float] | None = None
    response_format: TextFormat | None = None
    tools: Annotated[list[ToolEntry], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    chat_template_kwargs: TemplateOptions | None = None
    reasoning_effort: Literal["none", "low", "medium", "high"] | None = None
    thinking_budget: int | None = None
    reasoning_format: Literal["auto", "deepseek", "none"] | None = None
    return_progress: bool | None = None
    timings_per_token: Literal[False] | None = None
    cache_prompt: bool | None = None
    # Fields whose value, if it is one of these, asks for nothing.
    logprobs: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    user: Name | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    verbosity: Literal["medium"] | None = None
    functions: None = None
    function_call: None = None
    audio: None = None
    prediction: None = None
    web_search_options: None = None


ADVICE = {
    "logprobs": "log probabilities are not offered yet",
    "top_logprobs": "log probabilities are not offered yet",
    "response_format": "only {'type': 'text'} is offered yet",
    "tool_choice": "only 'auto' and 'none' are offered yet",
    "parallel_tool_calls": "the model may make several calls at once; leave this out",
    "timings_per_token": "timings come once, at the end",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "store": "answers are not stored; leave this out",
    "service_tier": "there is one tier; leave this out",
    "modalities": "the model reads and writes text only",
    "audio": "the model reads and writes text only",
    "image_url": "the model reads text only",
    "verbosity": "say so in the messages instead",
    "grammar": "constrained output is not offered yet",
    "json_schema": "constrained output is not offered yet",
    "typical_p": "use top_p, top_k or min_p",
    "mirostat": "use top_p, top_k or min_p",
    "best_of": "use n",
    "name": "say in the text who speaks",
    "strict": "arguments are not held to the schema yet; leave this out",
    "reasoning_effort": "use none, low, medium or high, or thinking_budget in tokens",
}
"""What to do instead, by the name of the field that is refused."""
