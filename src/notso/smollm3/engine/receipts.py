"""Receipts: records with which an answer can be verified, given the model file.

A receipt contains an answer's tokens and everything that determines them, such as the digest of the model file, the
prompt, and the parameters with the seed. To verify a receipt, the engine prefills the prompt and the answer together
and samples every token again; equal tokens are expected, because results are bit-identical. An open receipt contains
the token ids; a sealed one contains only their SHA-256. A sealed receipt is verified with a transcript, which is an
open receipt of the same answer.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from itertools import zip_longest
from typing import Any

from notso.extras import installed_release
from notso.qtensor import GGUFFile
from notso.smollm3.engine.request import Request, ids_digest
from notso.smollm3.errors import EngineError, InvalidRequestError, require
from notso.smollm3.kv.model_identity import ARITHMETIC
from notso.smollm3.sampling.sampler import Floats
from notso.smollm3.values.request_options import Grammar, QuoteSource, Replay, RequestOptions, ToolName
from notso.smollm3.values.sampling_params import PARAMETERS, SamplingParams
from notso.text_file import open_regular

VERSION = 1
READ_BYTES = 4 << 20
# Entries that receipts of earlier releases do not have.
OPTIONAL_FACTS = ("rope_scaling",)
_OMITTED_IF_SEALED = ("ids", "started", "grammar", "tools", "tool_choice", "strict_tools", "sources")


class ModelDigest:
    """The SHA-256 of a model file, computed once. Thread-safe."""

    def __init__(self, file: GGUFFile) -> None:
        self._path, self._status = file.path, file.status
        self._lock = threading.Lock()
        self._sha256 = ""

    def compute(self) -> str:
        """Return the digest in hexadecimal. The first call takes as long as reading the file. Raises EngineError."""
        with self._lock:
            if not self._sha256:
                try:
                    with open(open_regular(self._path), "rb") as source:  # noqa: PTH123 - a descriptor
                        status = os.fstat(source.fileno())
                        if not os.path.samestat(status, self._status) or status.st_mtime_ns != self._status.st_mtime_ns:
                            raise EngineError("the model file was replaced after it was loaded, so it cannot be hashed")
                        self._sha256 = hashlib.file_digest(source, "sha256").hexdigest()
                except OSError as error:
                    raise EngineError(f"the model file can no longer be read: {error.strerror}") from error
            return self._sha256


def build_receipt(request: Request, options: RequestOptions, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the open receipt of the answer that `request` replayed. `facts`: model, adapter, template, KV format and
    RoPE scaling."""
    params, defaults = request.sampler.params, SamplingParams()
    sampling = {each.name: getattr(params, each.name) for each in fields(params) if each.name not in ("given", "seed")}
    changed = {name: value for name, value in sampling.items() if value != getattr(defaults, name)}
    if "logit_bias" in changed:  # keys are text, as in JSON, because numbers would be sorted differently
        changed["logit_bias"] = {str(token): bias for token, bias in changed["logit_bias"].items()}
    choice = options.tool_choice
    prompt, ids = list(request.sequence.prompt), request.sequence.tokens[len(request.sequence.prompt) :]
    record = {
        "notso_receipt": VERSION,
        "form": "open",
        "program": installed_release(),
        "arithmetic": ARITHMETIC,
        **facts,
        "seed": request.sampler.seed,
        "sampling": changed,
        "limit": request.max_tokens,
        "thinking_budget": request.thinking_budget,
        "prompt": {
            "tokens": len(prompt),
            "sha256": ids_digest(prompt),
            "ids": prompt,
            "started": request.answer_prefix,
        },
        "options": {
            "is_plain": request.is_plain,
            **({} if options.thinking else {"thinking": False}),
            "parallel_tool_calls": options.parallel_tool_calls,
            "logits_processors": list(options.logits_processors),
            "grammar": None if options.grammar is None else asdict(options.grammar),
            "tools": None if options.tools is None else list(options.tools),
            "tool_choice": {"name": choice.name} if isinstance(choice, ToolName) else choice,
            "strict_tools": list(options.strict_tools),
            "sources": [asdict(each) for each in options.sources],
        },
        "answer": {
            "tokens": len(ids),
            "sha256": ids_digest(ids),
            "ids": ids,
            "closed_at": list(request.closed_at),
            "finish_reason": request.finish_reason,
        },
    }
    record["options"]["sha256"] = _hash(record["options"])
    return record | {"digest": _hash(record)}


def sealed(receipt: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sealed receipt: the open receipt without the conversation."""
    record = {name: value for name, value in receipt.items() if name != "digest"} | {"form": "sealed"}
    for part in ("prompt", "options", "answer"):
        record[part] = {name: value for name, value in record[part].items() if name not in _OMITTED_IF_SEALED}
    return record | {"digest": _hash(record)}


@dataclass(frozen=True, slots=True)
class ReceiptCheck:
    """Result of verifying a receipt."""

    problem: str  # "" if the model produces the same answer again
    place: int | None = None  # index of the first differing token in the answer; None if no token differs
    tokens: int = 0


def open_receipt(receipt: Any, transcript: Any = None) -> dict[str, Any]:
    """Verify the hashes of a receipt and its transcript; return the open receipt.

    Raises InvalidRequestError; `param` names the part that does not match.
    """
    record = _validate_receipt(receipt, "receipt")
    if record["form"] == "sealed":
        if transcript is None:
            raise InvalidRequestError("a sealed receipt can be checked only with its transcript", param="transcript")
        whole = _validate_receipt(transcript, "transcript")
        if whole["form"] != "open":
            raise InvalidRequestError("the transcript must be an open receipt of the answer", param="transcript")
        for name, value in sealed(whole).items():
            if name != "digest" and not _is_left_out(record, name) and value != record.get(name):
                raise InvalidRequestError(f"the transcript's {name} differs from the receipt's", param="transcript")
        record = whole | {name: record[name] for name in OPTIONAL_FACTS if name in record}
    for part in ("prompt", "answer"):
        ids, tokens, digest = (record[part][name] for name in ("ids", "tokens", "sha256"))
        if len(ids) != tokens or ids_digest(ids) != digest:
            raise InvalidRequestError(f"the token ids of the {part} do not match their hash", param=part)
    options = {name: value for name, value in record["options"].items() if name != "sha256"}
    if _hash(options) != record["options"]["sha256"]:
        raise InvalidRequestError("the options do not match their hash", param="options")
    return record


def require_facts(receipt: Mapping[str, Any], facts: Mapping[str, Any], trained_tokens: int) -> None:
    """Raise InvalidRequestError unless the receipt records these `facts` and this version of the numerical code."""
    for name, current in facts.items():
        if _is_left_out(receipt, name) or (name == "adapter" and current is None):
            continue
        recorded = receipt.get(name)
        if isinstance(current, dict):  # only the digests must be equal, not the names
            recorded, current = (recorded or {}).get("sha256"), current["sha256"]
        if recorded != current:
            message = f"the receipt belongs to another {name.replace('_', ' ')}"
            if name == "rope_scaling":
                bound = "up to" if current == "yarn" else "more than"
                message += f"; load the model with a context of {bound} {trained_tokens:,} tokens"
            raise InvalidRequestError(message, param=name)
    if receipt["arithmetic"] != ARITHMETIC:
        raise InvalidRequestError("the receipt belongs to another version of the numerical code", param="arithmetic")


def _is_left_out(receipt: Mapping[str, Any], name: str) -> bool:
    return name in OPTIONAL_FACTS and name not in receipt


def receipt_params(receipt: Mapping[str, Any]) -> SamplingParams:
    """Return an open receipt's sampling parameters. Raises InvalidRequestError."""
    names = {each.name for each in fields(SamplingParams)}
    values = dict(receipt["sampling"])
    if not values.keys() <= names:
        raise InvalidRequestError("the receipt has unknown sampling parameters", param="sampling")
    if "logit_bias" in values:
        values["logit_bias"] = {int(token): bias for token, bias in values["logit_bias"].items()}
    for name, value in values.items():
        if isinstance(value, list):
            values[name] = tuple(value)
    # `max_tokens` is None here, because SamplingParams rejects a limit below `min_tokens`; see `receipt_limit`.
    values |= {"seed": receipt["seed"], "max_tokens": None, "thinking_budget": receipt["thinking_budget"]}
    # All fields are marked as `given`, because the recorded values already include the model file's defaults.
    return SamplingParams(**values, given=tuple(names - {"given"}))


def receipt_limit(receipt: Mapping[str, Any]) -> int:
    """Return an open receipt's token limit. Raises InvalidRequestError."""
    limit, most = receipt["limit"], PARAMETERS["max_tokens"].high
    require(type(limit) is int and 0 <= limit <= most, "limit", f"an integer from 0 to {most}")
    return int(limit)


def receipt_options(receipt: Mapping[str, Any]) -> RequestOptions:
    """Return an open receipt's request options. Raises InvalidRequestError."""
    record = receipt["options"]
    choice, grammar = record["tool_choice"], record["grammar"]
    return RequestOptions(
        thinking=record.get("thinking", True),
        tools=record["tools"],
        tool_choice=ToolName(choice["name"]) if isinstance(choice, dict) else choice,
        parallel_tool_calls=record["parallel_tool_calls"],
        strict_tools=tuple(record["strict_tools"]),
        grammar=None if grammar is None else Grammar(**grammar),
        is_plain=record["is_plain"],
        logits_processors=tuple(record["logits_processors"]),
        sources=tuple(QuoteSource(**each) for each in record["sources"]),
    )


class ReceiptVerifier:
    """Samples an answer again from the recomputed logits that `consume` receives."""

    def __init__(self, request: Request, answer: Replay, finish_reason: str) -> None:
        self._request = request
        self._answer = answer
        self._finish_reason = finish_reason
        self._last_prompt_position = len(request.sequence.prompt) - 1
        self._result: ReceiptCheck | None = None

    def consume(self, start: int, logits: Floats) -> tuple[()]:
        for position, row in enumerate(logits, start):
            if self._result is None and position - self._last_prompt_position == self._request.output.tokens:
                self._check(row)
        return ()

    def end(self) -> ReceiptCheck:
        if self._result is not None:
            return self._result
        reason, problem = self._request.finish_reason, ""
        if reason != self._finish_reason:
            problem = f"the answer ends with {reason!r}, not {self._finish_reason!r}"
        return ReceiptCheck(problem, None, len(self._answer.ids))

    def _check(self, row: Floats) -> None:
        request, ids = self._request, self._answer.ids
        at = request.output.tokens
        if at == len(ids):
            return
        if request.is_over:
            return self._record_mismatch(at, f"the answer ends before token {at}")
        if at in self._answer.closed_at:
            if not request.output.in_reasoning:
                return self._record_mismatch(
                    at, f"token {at} is recorded as the end of the reasoning, which had already ended"
                )
            request.close_reasoning()
            inserted = request.sequence.tokens[self._last_prompt_position + 1 + at :]
            for place, (token, recorded) in enumerate(zip_longest(inserted, ids[at : at + len(inserted)]), at):
                if token != recorded:
                    return self._record_mismatch(
                        place, f"token {place} is recorded as the end of the reasoning, but is not"
                    )
            return None
        token = request.choose_token(row)
        if token != ids[at]:
            return self._record_mismatch(at, f"token {at} is {ids[at]}, but the model samples {token}")
        request.consume(token)
        after = request.output.tokens
        if (
            request.must_close_reasoning
            and not request.is_over
            and after < len(ids)
            and after not in self._answer.closed_at
        ):
            self._record_mismatch(after, f"the reasoning continues at token {after}, where it had to end")
        return None

    def _record_mismatch(self, at: int, problem: str) -> None:
        self._result = ReceiptCheck(problem, at, len(self._answer.ids))


def _validate_receipt(receipt: Any, name: str) -> dict[str, Any]:
    keys = ("form", "model", "seed", "sampling", "limit", "thinking_budget", "prompt", "options", "answer", "digest")
    if not isinstance(receipt, dict) or receipt.get("notso_receipt") != VERSION:
        raise InvalidRequestError(f"the {name} is not a receipt of version {VERSION}", param=name)
    parts = ("model", "sampling", "prompt", "options", "answer")
    if missing := [each for each in keys if each not in receipt]:
        raise InvalidRequestError(f"the {name} lacks {', '.join(missing)}", param=name)
    if receipt["form"] not in ("open", "sealed") or not all(isinstance(receipt[each], dict) for each in parts):
        raise InvalidRequestError(f"the {name} is malformed", param=name)
    content = {each: value for each, value in receipt.items() if each != "digest"}
    if _hash(content) != receipt["digest"]:
        raise InvalidRequestError(f"the {name} was changed: its digest does not match", param="digest")
    return dict(receipt)


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def receipt_replay(receipt: Mapping[str, Any]) -> Replay:
    """Return an open receipt's answer. Raises InvalidRequestError."""
    answer = receipt["answer"]
    return Replay(tuple(answer["ids"]), tuple(answer["closed_at"]))
