"""Backends that run the demo model: the project's engine, llama.cpp and transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from training.corpus import render

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Reply:
    """The model's output: reasoning, answer, and the JSON of a tool call, if any."""

    reasoning: str
    text: str
    call: str | None

    def as_message(self) -> dict[str, str]:
        """Return the reply as a message of the conversation, without the reasoning."""
        content = self.text if self.call is None else f"<tool_call>\n{self.call}\n</tool_call>"
        return {"role": "assistant", "content": content}


Ask = Callable[[Messages, bool, list[str] | None], Reply]  # messages, thinking, tools as JSON
MAX_TOKENS = 400
DATE = "17 May 2027"


def parse(output: str) -> Reply:
    """Split the raw output into reasoning, text and tool call."""
    reasoning, text, call = "", output, None
    if "<think>" in text:
        reasoning, _, text = text.partition("<think>")[2].partition("</think>")
    if "<tool_call>" in text:
        text, _, rest = text.partition("<tool_call>")
        call = rest.partition("</tool_call>")[0].strip()
    return Reply(reasoning.strip(), text.strip(), call)


def notso(path: Path | None, adapter: Path | None = None) -> Ask:
    """Run the project's engine, optionally with a LoRA adapter."""
    from notso import Engine, Message, RequestOptions, SamplingParams, ToolCall

    adapters = [f"tuned={adapter}"] if adapter else []
    engine = Engine.load(path, adapters=adapters)
    name = "tuned" if adapter else None

    def turn(message: dict[str, str]) -> Message:
        call = parse(message["content"]).call if message["role"] == "assistant" else None
        if call is None:
            return Message(message["role"], message["content"])  # type: ignore[arg-type]
        try:
            made = json.loads(call)
            arguments = json.dumps(made["arguments"], ensure_ascii=False)
            return Message("assistant", "", tool_calls=(ToolCall("call", made["name"], arguments),))
        except (ValueError, KeyError, TypeError):
            return Message("assistant", message["content"])

    def ask(messages: Messages, thinking: bool, tools: list[str] | None) -> Reply:
        parts = {"reasoning": "", "text": ""}
        call = None
        turns = [turn(m) for m in messages]
        given = [json.loads(tool) for tool in tools] if tools else None
        params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0)
        for event in engine.generate(turns, params, RequestOptions(thinking=thinking, tools=given, adapter=name)):
            if event.kind in parts:
                parts[event.kind] += event.text
            elif event.kind == "tool_call" and event.tool_call is not None:
                call = f'{{"name": {json.dumps(event.tool_call.name)}, "arguments": {event.tool_call.arguments}}}'
        return Reply(parts["reasoning"].strip(), parts["text"].strip(), call)

    return ask


def llama_cpp(path: Path | None) -> Ask:
    """Run llama.cpp through llama-cpp-python, on prompts from `render`."""
    from llama_cpp import Llama

    model = Llama(str(path), n_ctx=4096, n_threads=1, n_threads_batch=1, verbose=False)

    def ask(messages: Messages, thinking: bool, tools: list[str] | None) -> Reply:
        prompt = render(messages, thinking=thinking, day=DATE, tools=tools, prompt=True)
        ids = model.tokenize(prompt.encode(), add_bos=False, special=True)
        out: list[int] = []
        for token in model.generate(ids, temp=0.0, repeat_penalty=1.0):
            if token == model.token_eos() or len(out) >= MAX_TOKENS:
                break
            out.append(token)
        return parse(model.detokenize(out, special=True).decode("utf-8", "replace"))

    return ask


def transformers(path: Path | None) -> Ask:
    """Run Hugging Face transformers on the exported folder."""
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path).eval()

    def ask(messages: Messages, thinking: bool, tools: list[str] | None) -> Reply:
        prompt = render(messages, thinking=thinking, day=DATE, tools=tools, prompt=True)
        ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=MAX_TOKENS,
                do_sample=False,
                eos_token_id=model.config.eos_token_id,
            )
        new = [t for t in out[0, ids.shape[1] :].tolist() if t != model.config.eos_token_id]
        return parse(tokenizer.decode(new, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    return ask


BACKENDS: dict[str, Callable[[Path | None], Ask]] = {
    "notso": notso,
    "llama-cpp": llama_cpp,
    "transformers": transformers,
}
