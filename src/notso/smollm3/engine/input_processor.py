"""Validate and render prompts, and build requests from them."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from notso.smollm3.engine.engine_core import WorkSignal
from notso.smollm3.engine.receipts import ReceiptVerifier, receipt_limit, receipt_params, receipt_replay
from notso.smollm3.engine.request import MeanPooling, Request, ids_digest
from notso.smollm3.errors import ContextLengthError, InvalidRequestError
from notso.smollm3.model.lora import Adapter
from notso.smollm3.output.generation import Generation
from notso.smollm3.output.output_processor import OutputProcessor, PromptScores, token_logprob
from notso.smollm3.sampling.grammar import GrammarCompiler
from notso.smollm3.sampling.logits_processor import FindProcessor, answer_end_for, logits_processors_for
from notso.smollm3.sampling.quoted_fields import quoted_fields
from notso.smollm3.sampling.quotes import PinnedReading, QuoteManager
from notso.smollm3.sampling.sampler import NO_BREAKERS, Sampler, SequenceBreakers
from notso.smollm3.sampling.structured_output import check_strict_tools, structured_output_for, tool_names
from notso.smollm3.scheduling.block_pool import BLOCK_TOKENS, NO_SALT, CacheSalt, conversation_digest, reading_digest
from notso.smollm3.scheduling.ngram_drafter import NgramDrafter, StepLatency
from notso.smollm3.scheduling.sequence import PRIORITIES
from notso.smollm3.scheduling.sequence import Sequence as ScheduledSequence
from notso.smollm3.text.prompt import GENERATION_TOKENS, Prompt, PromptWriter, validate_ids
from notso.smollm3.text.tokenizer import Tokenizer
from notso.smollm3.values.events import Event
from notso.smollm3.values.messages import Message
from notso.smollm3.values.request_options import PromptInput, RequestOptions
from notso.smollm3.values.sampling_params import SamplingParams

# Number of recent tokens that speculative decoding searches. A larger index would take memory that long contexts need.
DRAFT_HISTORY_TOKENS = 32_768

# Maximum number of log probabilities per prompt. Each takes a few hundred bytes.
MAX_PROMPT_ENTRIES = 262_144


class InputProcessor:
    """Builds the requests of one model. Thread-safe.

    latency: estimates the cost of drafts; None disables speculative decoding. find_processor: name -> logits processor.
    """

    def __init__(
        self,
        prompts: PromptWriter,
        tokenizer: Tokenizer,
        context_tokens: int,
        document_tokens: int,
        hidden_size: int,
        signal: WorkSignal,
        latency: StepLatency | None,
        find_processor: FindProcessor | None,
        sampling: Mapping[str, float],
        arithmetic: str,
        quote_folder: Path | None,
    ) -> None:
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._grammars = GrammarCompiler(tokenizer)
        self.quotes = QuoteManager(tokenizer, quote_folder)
        self._breakers = SequenceBreakers(tokenizer)
        self._context_tokens = context_tokens
        self._document_tokens = document_tokens
        self._hidden_size = hidden_size
        self._signal = signal
        self._latency = latency
        self._find_processor = find_processor
        self._sampling = sampling
        self._arithmetic = arithmetic
        thinking = (tokenizer.think_open_id, tokenizer.think_close_id)
        self._never_drafted = tokenizer.control_ids | {token for token in thinking if token is not None}

    def write(
        self,
        prompt_input: PromptInput,
        params: SamplingParams,
        options: RequestOptions,
        salt: CacheSalt,
        adapter: Adapter | None = None,
        *,
        rendered: Prompt | None = None,
    ) -> Request:
        """Build a request. salt: see `salt_with_prefix`. rendered: the prompt, if already rendered. Raises
        InvalidRequestError, ContextLengthError or TemplateError."""
        params = params.with_defaults(self._sampling)
        if options.tool_choice not in ("auto", "none"):  # `grammar` does not apply to tool calls
            options = replace(options, grammar=None)
        prompt = rendered or self._prompt_within_context(prompt_input, params, options)
        tokenizer = self._tokenizer
        is_plain = isinstance(prompt_input, str) or options.is_plain
        room = self.context_of(options) - len(prompt.ids)
        pinned = _pinned_reading(prompt_input, options)
        options, fields = quoted_fields(options, self.quotes, pinned)
        if rendered is None:  # not for receipts: in earlier releases, tool_choice could exclude strict tools
            check_strict_tools(options)
        structured_output = structured_output_for(
            options,
            tokenizer,
            self._grammars,
            may_think=prompt.may_think,
            started=prompt.started,
            closing=len(self._prompts.end_of_reasoning),
            fields=fields,
        )
        structured_output = self.quotes.output(options.sources, structured_output, prompt.started, pinned)
        is_structured = structured_output is not None and structured_output.has_grammar
        may_call = bool(options.tools) and options.tool_choice != "none" and not (is_structured and prompt.started)
        _check_stop_parameters(params, is_structured, tokenizer.vocab_size)
        prompt_scorer = self._prompt_scorer(prompt.ids, options.prompt_logprobs)
        top, dropped = options.top_logprobs, prompt.dropped_messages
        request = Request(
            sequence=ScheduledSequence(
                prompt.ids,
                salt=self.salt_with_prefix(salt, prompt, prompt_input, options),
                adapter=adapter,
                scored=options.prompt_logprobs is not None or options.embedding,
                priority=PRIORITIES[options.priority],
                conversation=conversation_digest(options.owner, options.conversation),
                reading=prefix_reading_digest(options),
                owner=options.owner,
            ),
            generation=Generation(self._signal.wake),
            sampler=self._sampler(params),
            output=OutputProcessor(
                tokenizer,
                prompt.ids,
                params.stop,
                may_call,
                prompt.goes_on,
                is_plain,
                one_call=not options.parallel_tool_calls,
                is_structured=is_structured,
                calls_are_valid=structured_output is not None and structured_output.constrains_tool_calls,
                tool_names=tool_names(options.tools or ()),
                stop_token_ids=params.stop_token_ids,
                min_tokens=params.min_tokens,
            ),
            max_tokens=0 if options.prompt_only else min(params.max_tokens or room, room),
            thinking_budget=params.thinking_budget,
            end_of_reasoning_ids=self._prompts.end_of_reasoning,
            create_drafter=None if self._latency is None else partial(self._drafter, prompt.ids, self._latency),
            processors=logits_processors_for(options.logits_processors, self._find_processor),
            structured_output=structured_output,
            answer_end=answer_end_for(params, tokenizer.end_ids),
            prompt_scorer=prompt_scorer,
            pooling=MeanPooling(len(prompt.ids), self._hidden_size) if options.embedding else None,
            token_logprob=None if top is None else partial(token_logprob, tokenizer, alternatives=top),
            next_ids=None if is_structured or dropped else self._next_ids(prompt_input, params, options),
            initial_events=[Event("trimmed", dropped_messages=dropped)] if dropped else [],
            reports_ids=options.token_ids,
            answer_prefix=prompt.started if prompt.goes_on and not is_plain else None,
            is_plain=is_plain,
            origin=self._origin(prompt.ids, adapter) if options.token_ids or options.replay is not None else "",
        )
        if options.replay is not None:
            validate_ids(options.replay.ids or (0,), tokenizer.vocab_size)
            request.replay(options.replay)
        return request

    def build_verification(
        self, receipt: Mapping[str, Any], options: RequestOptions, adapter: Adapter | None
    ) -> tuple[Request, ReceiptVerifier]:
        """Return a request that computes the logits of a receipt's answer, and the verifier that samples it again.

        Raises InvalidRequestError or ContextLengthError.
        """
        recorded, answer = receipt["prompt"], receipt_replay(receipt)
        ids, started = validate_ids(recorded["ids"], self._tokenizer.vocab_size), recorded["started"]
        validate_ids(answer.ids or (0,), self._tokenizer.vocab_size)
        whole = [*ids, *answer.ids[:-1]]
        if len(whole) > self._document_tokens:  # receipts do not record prefixes, so the longer context applies
            raise ContextLengthError(len(whole), self._document_tokens)
        goes_on = started is not None or options.is_plain
        prompt = Prompt(ids, goes_on, started=started or "", may_think=not goes_on and self._prompts.may_think(ids))
        request = self.write(ids, receipt_params(receipt), options, NO_SALT, adapter, rendered=prompt)
        # The token limit affects where grammars end answers and reasoning, so this engine's context must not reduce it.
        request.max_tokens = receipt_limit(receipt)
        verifier = ReceiptVerifier(request, answer, receipt["answer"]["finish_reason"])
        scoring_options = RequestOptions(prompt_only=True, is_plain=True, priority="background")
        scoring = self.write(
            whole, SamplingParams(), scoring_options, NO_SALT, adapter, rendered=Prompt(whole, goes_on=True)
        )
        scoring.prompt_scorer, scoring.sequence.scored, scoring.sequence.scored_from = verifier, True, len(ids) - 1
        return scoring, verifier

    def draft(
        self, messages: Sequence[Message], params: SamplingParams, options: RequestOptions, salt: CacheSalt
    ) -> tuple[list[int], int, CacheSalt]:
        """Return the ids of an unsent prompt, the position of its last turn, and its salt (see `salt_with_prefix`).
        Raises the same errors as `write`, and InvalidRequestError if the last message is not the user's."""
        messages = [*messages] if isinstance(messages, Sequence) else []
        ends_with_message = bool(messages) and isinstance(messages[-1], Message)
        if not ends_with_message or messages[-1].role != "user" or options.continue_last:
            raise InvalidRequestError("only a user message can be prefilled in advance", param="messages")
        prompt = self._prompt_within_context(messages, params, options)
        turn_at = self._prompts.last_turn_at(prompt, messages, options)
        return prompt.ids, turn_at, self.salt_with_prefix(salt, prompt, messages, options)

    def context_of(self, options: RequestOptions) -> int:
        return self._document_tokens if options.prefix is not None else self._context_tokens

    def salt_with_prefix(
        self, salt: CacheSalt, prompt: Prompt, prompt_input: PromptInput, options: RequestOptions
    ) -> CacheSalt:
        """Return `salt` with the number of blocks that lie entirely within the fixed prefix of `options`."""
        if options.prefix is None:
            return salt
        tokens = self._prompts.prefix_tokens(prompt, cast(Sequence[Message], prompt_input), options)
        return replace(salt, shared_blocks=tokens // BLOCK_TOKENS)

    def _origin(self, ids: list[int], adapter: Adapter | None) -> str:
        parts = (self._arithmetic, "" if adapter is None else adapter.digest.hex(), ids_digest(ids))
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()

    def _prompt_scorer(self, ids: list[int], alternatives: int | None) -> PromptScores | None:
        if alternatives is None:
            return None
        entries = len(ids) * (1 + alternatives)
        if entries > MAX_PROMPT_ENTRIES:
            raise InvalidRequestError(
                f"prompt_logprobs: {entries:,} log probabilities were requested; the limit is {MAX_PROMPT_ENTRIES:,}",
                param="prompt_logprobs",
            )
        return PromptScores(self._tokenizer, ids, alternatives)

    def _sampler(self, params: SamplingParams) -> Sampler:
        seed = secrets.randbits(63) if params.seed is None else params.seed
        breakers = self._breakers.of(params.dry_sequence_breakers) if params.uses_dry else NO_BREAKERS
        return Sampler(params, seed, self._tokenizer.vocab_size, breakers)

    def _prompt_within_context(
        self, prompt_input: PromptInput, params: SamplingParams, options: RequestOptions
    ) -> Prompt:
        prompt = self._prompt(prompt_input, params, options)
        needed = len(prompt.ids) + (0 if options.prompt_only else 1)
        if needed > self.context_of(options):
            raise ContextLengthError(needed, self.context_of(options))
        return prompt

    def _prompt(self, prompt_input: PromptInput, params: SamplingParams, options: RequestOptions) -> Prompt:
        try:
            first = None if isinstance(prompt_input, Mapping) else prompt_input[0]
        except (TypeError, LookupError):
            first = None
        if first is None:
            raise InvalidRequestError("messages or token ids are required", param="messages")
        if isinstance(prompt_input, str):
            options.require_for_prompt(is_text=True)
            self._tokenizer.check_length([prompt_input], self._context_tokens)
            return Prompt(self._tokenizer.encode(prompt_input), goes_on=True)
        if not isinstance(first, Message):
            options.require_for_prompt(is_text=False)
            ids = validate_ids(cast(Sequence[int], prompt_input), self._tokenizer.vocab_size)
            return Prompt(ids, options.is_plain, may_think=not options.is_plain and self._prompts.may_think(ids))
        return self._prompts.write_within_context(
            cast(Sequence[Message], prompt_input),
            options,
            context_tokens=self.context_of(options),
            reserved_tokens=self._reserved_tokens(params, options),
        )

    def _next_ids(
        self, prompt_input: PromptInput, params: SamplingParams, options: RequestOptions
    ) -> Callable[[Message], list[int]] | None:
        # Returns a function that renders the start of the next prompt, or None if no further turn is expected.
        if not isinstance(prompt_input[0], Message) or options.continue_last or options.priority == "background":
            return None
        messages = tuple(cast(Sequence[Message], prompt_input))
        keep_reasoning = any(message.keep_reasoning for message in messages)
        reserved = self._reserved_tokens(params, options) if options.when_full == "drop_oldest" else 1
        limit = self.context_of(options) - reserved

        def write(answer: Message) -> list[int]:
            history = [*messages, replace(answer, keep_reasoning=keep_reasoning)]
            ids = self._prompts.beginning(history, options)
            return ids if len(ids) < limit else []

        return write

    def _reserved_tokens(self, params: SamplingParams, options: RequestOptions) -> int:
        # Returns at most half of the context, because many clients set max_tokens to more than the context.
        context = self.context_of(options)
        return min(params.max_tokens or min(GENERATION_TOKENS, context // 4), context // 2)

    def _drafter(self, ids: list[int], latency: StepLatency) -> NgramDrafter:
        return NgramDrafter(ids[-DRAFT_HISTORY_TOKENS:], never=self._never_drafted, latency=latency)


def prefix_reading_digest(options: RequestOptions) -> bytes | None:
    """Return the digest of the reading (see block_pool) that pins a prompt's fixed prefix, or None."""
    prefix = options.prefix
    if prefix is None or prefix.reading is None:
        return None
    return reading_digest(options.owner, prefix.scope, prefix.reading)


def _pinned_reading(prompt_input: PromptInput, options: RequestOptions) -> PinnedReading | None:
    reading, prefix = prefix_reading_digest(options), options.prefix
    if reading is None or prefix is None or isinstance(prompt_input, str) or prefix.message >= len(prompt_input):
        return None
    message = prompt_input[prefix.message]
    return PinnedReading(reading, message.content[: prefix.characters]) if isinstance(message, Message) else None


def _check_stop_parameters(params: SamplingParams, is_structured: bool, vocab_size: int) -> None:
    if max(params.stop_token_ids, default=0) >= vocab_size:
        raise InvalidRequestError(f"stop_token_ids must be below {vocab_size}", param="stop_token_ids")
    for name in ("ignore_eos", "min_tokens"):
        if is_structured and getattr(params, name):
            raise InvalidRequestError(
                f"{name} cannot be combined with structured output, which determines where the answer ends", param=name
            )
