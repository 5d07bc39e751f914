"""The engine, which serves concurrent requests with one loaded model."""

from __future__ import annotations

import hashlib
import os
import stat
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from notso.qtensor import Backend, DeviceLostError, GGUFFile, NotsoError, release_freed_memory, set_error_path
from notso.smollm3.config import SmolLM3Config
from notso.smollm3.engine.adapters import Adapters
from notso.smollm3.engine.device_choice import (
    exclude_device,
    require_equal_results,
    run_on_selected_device,
    weights_bytes,
)
from notso.smollm3.engine.engine_core import CLOSED, ContextLogits, EngineCore, WorkSignal
from notso.smollm3.engine.input_processor import InputProcessor
from notso.smollm3.engine.memory_plan import LARGE_CACHE_BYTES, plan_file, step_rows, store_kv_format_choice
from notso.smollm3.engine.model_description import model_info, sampling_defaults
from notso.smollm3.engine.receipts import (
    ModelDigest,
    ReceiptCheck,
    build_receipt,
    open_receipt,
    receipt_options,
    require_facts,
)
from notso.smollm3.engine.receipts import sealed as seal
from notso.smollm3.engine.request import Request
from notso.smollm3.errors import (
    ContextLengthError,
    EngineError,
    InvalidRequestError,
    ModelFileError,
    Sentence,
    TemplateError,
    iterate,
    require,
)
from notso.smollm3.hub.registry import demo_path, resolve_model
from notso.smollm3.kv.kv_cache import KVCache
from notso.smollm3.kv.model_identity import IdentityWorker, ModelIdentity, cache_version, content_identity
from notso.smollm3.kv.offload import KVOffload
from notso.smollm3.model.lora import Adapter
from notso.smollm3.model.model_runner import ModelRunner
from notso.smollm3.model.weight_placement import WeightPlacement
from notso.smollm3.model.weights import SmolLM3Weights
from notso.smollm3.output.generation import AnswerStream, Generation, events_until
from notso.smollm3.sampling.logits_processor import FindProcessor
from notso.smollm3.scheduling.block_pool import BlockPool, CacheSalt, cache_salt, conversation_digest, reading_digest
from notso.smollm3.scheduling.ngram_drafter import StepLatency
from notso.smollm3.scheduling.scheduler import Scheduler
from notso.smollm3.text.chat_template import MAX_TEMPLATE_CHARACTERS, ChatTemplate
from notso.smollm3.text.prompt import PromptWriter, validate_ids
from notso.smollm3.text.tokenizer import Tokenizer
from notso.smollm3.values.chat_input import ChatInput, Turn, conversation, split_batch
from notso.smollm3.values.engine_config import AdapterSource, EngineConfig, EngineSettings, expand_home
from notso.smollm3.values.events import Completion, Event
from notso.smollm3.values.messages import Message, Priority
from notso.smollm3.values.model_info import EngineStats, PromptEstimate, StoredReading
from notso.smollm3.values.request_options import (
    AnswerSettings,
    PromptInput,
    RequestOptions,
    apply_settings,
    with_defaults,
)
from notso.smollm3.values.sampling_params import SamplingParams
from notso.system.files import file_type
from notso.text_file import NotTextError, is_unicode, read_text

DEMO = "demo"


def model_path(model: str | None) -> Path:
    """Return the model file for a path, a name from `notso list`, or a Hugging Face folder; None means the demo.

    A folder is converted once, into the user's cache folder. Raises ModelFileError for an unknown name, and the errors
    of the conversion.
    """
    if model is None:
        return demo_path()
    if not model:
        raise ModelFileError("the name of the model is empty")
    path = Path(expand_home(model))
    try:
        is_folder = stat.S_ISREG(file_type(path / "config.json"))
        is_path = file_type(path) != 0 or path.is_absolute() or path.suffix == ".gguf"
    except OSError as error:
        # The error also occurs if `model` is not a path and the current folder is not searchable.
        if os.path.lexists(path):
            raise ModelFileError(f"{path} cannot be used: {error.strerror}") from error
        is_folder = is_path = False
    if is_folder:
        from notso.smollm3.conversion.converter import cached_conversion

        return cached_conversion(path)
    if is_path:
        return path  # if the file is missing, opening it raises an error that says so
    return resolve_model(model) or demo_path()


def is_demo(model: str | None) -> bool:
    """Return whether `model` denotes the bundled model."""
    return model is None or (model.lower() == DEMO and not os.path.exists(model))  # noqa: PTH110 - raises no error


Floats = npt.NDArray[np.float32]

# Maximum number of unfinished requests.
MAX_WAITING = 4096

MAX_BATCHED = 256  # maximum number of unfinished requests of a `batch` or `embed` call; leaves room for other callers


class Engine:
    """A loaded SmolLM3. Thread-safe.

    An answer depends only on the model, KV format, context length, messages, parameters and options, not on concurrent
    requests, cache contents or threads.
    """

    def __init__(
        self,
        file: GGUFFile,
        config: EngineConfig,
        backend: Backend,
        note: str = "",
        find_processor: FindProcessor | None = None,
    ) -> None:
        self._file = file
        self.config = SmolLM3Config.from_metadata(file.metadata)
        weights = SmolLM3Weights.from_tensors(file.tensors, self.config)
        weight_bytes = weights_bytes(file, backend)
        plan = plan_file(file, self.config, config, weight_bytes, backend.memory(mapped_bytes=weight_bytes))
        require_equal_results(file, backend, config.threads)
        self.tokenizer = Tokenizer.from_gguf(file.metadata, file.path)
        file.metadata.release()
        release_freed_memory()  # building the tokenizer briefly takes hundreds of megabytes
        template = _load_template(file, self.tokenizer, config.chat_template_file)
        self._prompts = PromptWriter(template, self.tokenizer)
        sampling = sampling_defaults(file.metadata)
        self._context_tokens = plan.context_tokens
        self._closed = False
        self._digest = ModelDigest(file)
        # The order of construction matters, because components use earlier ones. No component may refer to the engine:
        # the finalizer keeps the components alive, so they would keep the engine alive, too. Device memory is allocated
        # before threads and folders are created, so that a failed allocation leaves nothing to clean up.
        signal, latency = WorkSignal(), StepLatency()
        self._pool = BlockPool(plan.kv_blocks, windows=plan.window_blocks or None)
        cache = KVCache(
            backend,
            self.config,
            plan.document_tokens,
            max_num_seqs=plan.max_num_seqs + 1,  # one more row of the block table, for `logits`
            blocks=plan.kv_blocks,
            kv_format=plan.kv_format,
            window_blocks=plan.window_blocks,
            windows=self._pool.windows,
            large_pages=plan.kv_bytes >= LARGE_CACHE_BYTES,
        )
        weights = weights.to_device(backend)
        self._placement = WeightPlacement(file, weights, signal.wake, backend, requested=config.weights)
        rows = step_rows(self.config, plan.context_tokens)
        self._runner = ModelRunner(self.config, weights, cache, self._placement, rows)
        self._offload: KVOffload | None = None
        self._identity: IdentityWorker | None = None
        version = partial(
            cache_version, config=self.config, kv_format=plan.kv_format, context_tokens=plan.context_tokens
        )
        arithmetic = version(content_identity(file)).hex()
        folder = None if config.cache_dir is None else Path(config.cache_dir)
        if folder is not None:
            store_kv_format_choice(file, self.config, config, plan)
            self._identity = IdentityWorker(file, folder)
            identity = self._identity.identity
            self._offload = KVOffload(
                cache, self._pool, folder, version(identity.current), config.cache_bytes, config.library_bytes
            )
            self._offload.adopt(version(identity.current), map(version, identity.earlier))
        self._scheduler = Scheduler(self._pool, plan.max_num_seqs, self._offload)
        self._inputs = InputProcessor(
            self._prompts,
            self.tokenizer,
            plan.context_tokens,
            plan.document_tokens,
            self.config.hidden_size,
            signal,
            latency if config.speculation else None,
            find_processor,
            sampling,
            arithmetic,
            None if folder is None else folder / "quotes",
        )
        self._lost_callbacks: list[Callable[[], None]] = []
        on_device_lost = partial(_handle_device_loss, backend, self._lost_callbacks)
        self._core = EngineCore(self._runner, self._scheduler, self._offload, signal, latency, on_device_lost)
        self._context_logits = ContextLogits(self._core, plan.max_num_seqs, self.config.vocab_size)
        self._shut_down = weakref.finalize(self, _shut_down, self._core, self._placement, self._identity, file)
        self.adapters = Adapters(self.config, self._core, backend)
        self._placement.start()
        if self._identity is not None and self._offload is not None:
            self._identity.start(self._core.is_idle, partial(_adopt_identity, self._core, self._offload, version))
        self.info = model_info(
            file,
            self.config,
            self.tokenizer,
            plan,
            backend,
            note=note,
            kv_bytes=cache.nbytes,
            is_demo=config.model is None,
            chat_template=self._prompts.template_source,
            template_drops=self._prompts.template_drops,
            sampling=sampling,
            arithmetic=arithmetic,
        )
        for source in config.adapters:
            self.adapters.add(AdapterSource.parse(source))

    @classmethod
    def load(
        cls,
        model: str | Path | EngineConfig | None = None,
        *,
        find_processor: FindProcessor | None = None,
        **settings: Unpack[EngineSettings],
    ) -> Engine:
        """Load a model. Keyword arguments are fields of EngineConfig.

        model: a GGUF file, a name from `notso list`, a Hugging Face folder (converted once and cached), "demo" or None
        (the bundled model), or an EngineConfig. find_processor: name -> logits processor.

        Raises GGUFError, ModelFileError, TemplateError, OutOfMemoryError, InvalidRequestError, KernelChoiceError,
        DeviceError, or UnknownOptionError for an unknown keyword.
        """
        base_settings: dict[str, Any] = model.to_dict() if isinstance(model, EngineConfig) else {"model": model}
        config = EngineConfig.from_dict({**base_settings, **settings})
        if is_demo(config.model):
            config = replace(config, model=None)
        path = model_path(config.model)

        def load(backend: Backend, note: str) -> Engine:
            file = GGUFFile.open(path)
            try:
                return cls(file, config, backend, note, find_processor)
            except NotsoError as error:
                template = config.chat_template_file if isinstance(error, TemplateError) else None
                set_error_path(error, template or path)
                raise

        return run_on_selected_device(config, load)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"on {self.info.device}"
        return f"<Engine {self.info.name!r}: {self.info.context_tokens:,} tokens of context, {state}>"

    @property
    def weight_placement(self) -> str:
        """Placement of the weights: "mmap", "packed", "hugepages", or the progress of copying."""
        return self._placement.state

    def wait_for_placement(self, timeout_s: float | None = None) -> None:
        """Wait until the weights are in their final location."""
        self._placement.finished.wait(timeout_s)

    def stats(self) -> EngineStats:
        return self._core.stats(self._placement.state)

    def clear_cache(self, owner: str | None = None, conversation: str | None = None) -> None:
        """Evict a conversation of `owner`, or everything, from memory and disk.

        Running answers continue; prefixes shared with other conversations are kept. Raises InvalidRequestError or
        EngineError.
        """
        self._require_open()
        if (owner is None) != (conversation is None):
            raise InvalidRequestError("owner and conversation must be given together", param="conversation")
        digest = None
        if owner is not None:
            _require_names(owner=owner, conversation=conversation)
            digest = conversation_digest(owner, conversation)
        self._core.call(lambda: self._clear_cache(digest))

    def _clear_cache(self, conversation: bytes | None) -> None:
        self._core.background.prefix_warmup.clear(conversation)
        if conversation is None:
            self._pool.clear()
        else:
            self._scheduler.evict(conversation)
        if self._offload is not None:
            self._offload.evict(conversation)

    def reading(self, name: str, *, scope: str | None = None, owner: str = "") -> StoredReading:
        """Return the size on disk of a scope's or owner's reading (a pinned prompt prefix).

        Raises InvalidRequestError or EngineError.
        """
        self._require_open()
        digest = _reading_digest(name, scope, owner)
        return StoredReading(*((0, 0) if self._offload is None else self._offload.readings.stored_size(digest)))

    def forget_reading(self, name: str, *, scope: str | None = None, owner: str = "") -> None:
        """Remove a pinned reading from memory and disk, except blocks that another reading contains.

        Running answers continue. Raises InvalidRequestError or EngineError.
        """
        self._require_open()
        digest = _reading_digest(name, scope, owner)

        def clear() -> None:
            self._core.background.prefix_warmup.clear()  # a pending prefill might store the reading again
            self._clear_cache(digest)

        self._core.call(clear)
        self._inputs.quotes.forget(digest)

    def close(self) -> None:
        """End running generations, and release the file and the cache."""
        self._closed = True
        self._shut_down()

    def when_lost(self, callback: Callable[[], None]) -> None:
        # If the GPU fails, each callback is called once, on the engine thread, and must not block. Running answers then
        # end with an error. The model runs on the CPU when it is loaded again.
        self._lost_callbacks.append(callback)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Prompts

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """Return token ids; `special`: parse control tokens. Raises InvalidRequestError for invalid Unicode."""
        require(isinstance(text, str), "text", "text")
        return self.tokenizer.encode(text, control=special)

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; invalid UTF-8 becomes U+FFFD. Raises InvalidRequestError."""
        return self.tokenizer.decode(validate_ids(ids, self.config.vocab_size, least=0), skip_control=False)

    def token_bytes(self, ids: Sequence[int]) -> list[bytes]:
        """Return the text of each token as UTF-8; some tokens end within a character. Raises InvalidRequestError."""
        return [self.tokenizer.token_bytes(id) for id in validate_ids(ids, self.config.vocab_size, least=0)]

    def render(self, messages: ChatInput, options: RequestOptions | None = None) -> str:
        """Return the prompt that the template renders."""
        _, options = with_defaults(None, options)
        turns = _turns(messages)
        return self._prompts.template.render(turns, thinking=options.thinking, tools=options.tools, date=options.date)

    def encode_chat(self, messages: ChatInput, options: RequestOptions | None = None) -> list[int]:
        # Control tokens come only from the template, never from the text of a message.
        _, options = with_defaults(None, options)
        return self._prompts.write(_turns(messages), options).ids

    def count_tokens(self, messages: ChatInput, options: RequestOptions | None = None) -> int:
        return len(self.encode_chat(messages, options))

    def estimate(self, messages: Sequence[Message], options: RequestOptions | None = None) -> PromptEstimate:
        """Return the expected cost of a prompt. Raises ContextLengthError if the prompt far exceeds the context."""
        self._require_open()
        _, options = with_defaults(None, options)
        prompt = self._prompts.write(messages, options, most_tokens=self._inputs.context_of(options))
        ids, salt = prompt.ids, self._inputs.salt_with_prefix(self._salt(options), prompt, messages, options)
        cached = self._core.call(lambda: self._scheduler.cached_length(salt, ids))
        per_token = self._core.prompt_s_per_token
        seconds = per_token * (len(ids) - cached) if per_token else None
        return PromptEstimate(len(ids), cached, seconds)

    # Measurements

    def logits(self, ids: Sequence[int], *, adapter: str | None = None) -> Floats:
        """Return logits (L, vocab) float32 after each id, starting with an empty context."""
        self._require_open()
        tokens = validate_ids(ids, self.config.vocab_size)
        if len(tokens) > self._context_tokens:
            raise ContextLengthError(len(tokens), self._context_tokens)
        return self._context_logits.compute(tokens, self.adapters.of(adapter))

    # Receipts

    def receipt(
        self,
        messages: PromptInput,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        *,
        sealed: bool = False,
    ) -> Mapping[str, Any]:
        """Return the receipt of an earlier answer (see docs/api.md). `params` must have the answer's seed, and
        `options.replay` the answer's tokens.

        sealed: include hashes instead of the conversation. The first receipt reads the whole model file. Raises the
        same errors as `submit`.
        """
        params, options = with_defaults(params, options)
        if options.replay is None or params.seed is None:
            raise InvalidRequestError("a receipt needs the seed and the tokens of the answer", param="replay")
        request = self._request(messages, params, options)
        adapter = self.adapters.of(options.adapter)
        if request.is_plain or not self._prompts.may_think(request.sequence.prompt):
            # Without reasoning, `thinking` has no effect. Receipts omit its default, True.
            options = replace(options, thinking=True)
        receipt = build_receipt(request, options, self._facts(adapter))
        return seal(receipt) if sealed else receipt

    def check_receipt(self, receipt: Mapping[str, Any], transcript: Mapping[str, Any] | None = None) -> ReceiptCheck:
        """Prefill a receipt's prompt and answer, and sample the answer's tokens again.

        transcript: an open receipt of the answer, required if `receipt` is sealed. Raises EngineError,
        ContextLengthError, and InvalidRequestError for a receipt that is malformed, was changed, or belongs to another
        model, adapter, template, KV format, RoPE scaling or version of the numerical code; `param` names the cause.
        """
        self._require_open()
        try:
            return self._check_receipt(open_receipt(receipt, transcript))
        except InvalidRequestError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise InvalidRequestError("the receipt is malformed", param="receipt") from error

    def _check_receipt(self, receipt: Mapping[str, Any]) -> ReceiptCheck:
        recorded_adapter: Any = receipt.get("adapter")
        infos = self.adapters.infos if recorded_adapter else {}
        names = [name for name, info in infos.items() if info.digest == recorded_adapter["sha256"]]
        if recorded_adapter and not names:
            raise InvalidRequestError("the receipt's adapter is not loaded", param="adapter")
        adapter = self.adapters.of(names[0]) if names else None
        require_facts(receipt, self._facts(adapter), self.config.max_position_embeddings)
        request, check = self._inputs.build_verification(receipt, receipt_options(receipt), adapter)
        if receipt["answer"]["ids"]:
            self._core.submit(request)
            if request.generation.result().finish_reason == "cancelled":  # the engine was closed in the meantime
                raise EngineError(CLOSED)
        return check.end()

    def _facts(self, adapter: Adapter | None) -> dict[str, Any]:
        known = None if self._identity is None else self._identity.sha256
        return {
            "model": {"name": self.info.name, "sha256": known or self._digest.compute()},
            "adapter": None if adapter is None else {"name": adapter.name, "sha256": adapter.digest.hex()},
            "template": {"sha256": hashlib.sha256(self._prompts.template_source.encode()).hexdigest()},
            "kv_format": self.info.kv_format,
            "rope_scaling": "yarn" if self.config.uses_yarn(self._context_tokens) else "none",
        }

    # Answers

    def chat(
        self,
        messages: ChatInput,
        *more: Turn,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        **settings: Unpack[AnswerSettings],
    ) -> Completion:
        """Return the whole answer. `messages`: a string (one user message), messages, or mappings as in OpenAI's API.

        Keyword arguments are fields of SamplingParams and RequestOptions, and take precedence over `params` and
        `options`. Raises InvalidRequestError, ContextLengthError, TemplateError, EngineError for a failed answer, or
        UnknownOptionError for an unknown keyword.
        """
        with self.stream(messages, *more, params=params, options=options, **settings) as answer:
            return answer.result()

    def stream(
        self,
        messages: ChatInput,
        *more: Turn,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        **settings: Unpack[AnswerSettings],
    ) -> AnswerStream:
        """Start an answer as `chat` does, and return an iterator over its events. Raises the same errors; the
        error of a failed answer is raised during iteration."""
        params, options = apply_settings(params, options, settings)
        return AnswerStream(self.submit(conversation(messages, *more), params, options), self)

    def batch(
        self,
        conversations: Iterable[ChatInput],
        *,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        **settings: Unpack[AnswerSettings],
    ) -> list[Completion]:
        """Answer conversations concurrently; return the answers in the same order.

        All conversations are validated before the first answer starts. Raises the same errors as `chat`; a failed
        answer stops the others.
        """
        each_conversation = split_batch(conversations)
        params, options = apply_settings(params, options, settings)
        submits = [self.prepare(conversation(each), params, options) for each in each_conversation]
        with closing(_submit_in_order(submits)) as generations:
            return [generation.result() for generation in generations]

    def continue_text(
        self,
        text: str | Sequence[int],
        *,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        **settings: Unpack[AnswerSettings],
    ) -> Completion:
        """Continue a text or token ids without a chat template. The continuation of a text has no reasoning.

        A model trained for conversations may end a text immediately; use `chat` for an answer. Raises the same errors
        as `chat`.
        """
        params, options = apply_settings(params, options, settings)
        with AnswerStream(self.submit(text, params, options), self) as answer:
            return answer.result()

    def embed(
        self, texts: str | Sequence[str], *, owner: str = "", adapter: str | None = None, priority: Priority = "api"
    ) -> Floats:
        """Return embeddings (texts, hidden) float32: the mean last-layer hidden state of each text, scaled to norm 1.

        SmolLM3 was not trained for embeddings; embedding models give better search results. Raises
        InvalidRequestError, ContextLengthError or EngineError.
        """
        options = RequestOptions(
            prompt_only=True, embedding=True, thinking=False, owner=owner, adapter=adapter, priority=priority
        )
        each_text = iterate([texts] if isinstance(texts, str) else texts, "texts", "a string or a list of strings")
        submits = [self.prepare(text, None, options) for text in each_text]
        vectors = []
        with closing(_submit_in_order(submits)) as generations:
            for generation in generations:
                generation.result()
                vector = next((event.embedding for event in generation.read() if event.kind == "embedding"), None)
                if vector is None:  # the engine was closed in the meantime
                    raise EngineError(CLOSED)
                vectors.append(vector)
        return np.array(vectors, np.float32).reshape(-1, self.config.hidden_size)

    # Generation

    def submit(
        self, messages: PromptInput, params: SamplingParams | None = None, options: RequestOptions | None = None
    ) -> Generation:
        """Answer messages, or continue text or token ids. Raises InvalidRequestError, ContextLengthError, TemplateError
        or EngineError."""
        return self.prepare(messages, params, options)()

    def prepare(
        self, messages: PromptInput, params: SamplingParams | None = None, options: RequestOptions | None = None
    ) -> Callable[[], Generation]:
        """Validate and build a request; return a function that submits it and may be called once."""
        request = self._request(messages, params, options)

        def submit() -> Generation:
            self._require_open()
            self._core.submit(request)
            return request.generation

        return submit

    def speculative_prefill(
        self, messages: Sequence[Message], params: SamplingParams | None = None, options: RequestOptions | None = None
    ) -> None:
        """Prefill an unsent prompt, in place of the owner's previous one, while the engine is idle.

        Nothing is written to disk. Raises the same errors as `submit`.
        """
        self._require_open()
        params, options = with_defaults(params, options)
        ids, turn_at, salt = self._inputs.draft(messages, params, options, self._salt(options))
        # Without a conversation name, the prefilled blocks belong to no conversation until a request uses them.
        has_name = options.conversation is not None
        conversation = conversation_digest(options.owner, options.conversation) if has_name else None
        adapter = self.adapters.of(options.adapter)
        draft = self._core.background.prefix_warmup.draft
        self._core.post(partial(draft, salt, adapter, conversation, ids, turn_at))

    def generate(
        self,
        messages: PromptInput,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        *,
        cancelled: Callable[[], bool] | None = None,
    ) -> Iterator[Event]:
        """Submit a request at the first iteration, and yield its events.

        The answer stops when the iterator is closed or `cancelled()` is true (polled fifty times a second). A string is
        continued, not answered, and causes a FutureWarning; use `chat`, `stream` or `continue_text` instead. Raises
        InvalidRequestError if the model ends the text immediately.
        """
        request = self._request(messages, params, options)
        events = self._events(request, cancelled or (lambda: False))
        if not isinstance(messages, str):
            return events
        warnings.warn(
            "generate continues a text without answering it; use chat or stream for an answer, or continue_text",
            FutureWarning,
            stacklevel=2,
        )
        return _reject_empty_answer(events)

    def _events(self, request: Request, cancelled: Callable[[], bool]) -> Generator[Event, None, None]:
        self._require_open()
        self._core.submit(request)
        yield from events_until(request.generation, cancelled)

    def _request(self, messages: PromptInput, params: SamplingParams | None, options: RequestOptions | None) -> Request:
        self._require_open()
        if self._core.requests >= MAX_WAITING:
            raise EngineError(
                Sentence(f"{MAX_WAITING:,} requests are already waiting", "engine_many_waiting", limit=MAX_WAITING)
            )
        params, options = with_defaults(params, options)
        adapter = self.adapters.of(options.adapter)
        return self._inputs.write(messages, params, options, self._salt(options), adapter)

    def _salt(self, options: RequestOptions) -> CacheSalt:
        adapter = self.adapters.of(options.adapter)
        scope = None if options.prefix is None else options.prefix.scope
        return cache_salt(b"" if adapter is None else adapter.digest, options.owner, scope)

    def _require_open(self) -> None:
        if self._closed:
            raise InvalidRequestError(CLOSED)
        self._core.require_process()


def _submit_in_order(submits: Sequence[Callable[[], Generation]]) -> Generator[Generation, None, None]:
    # The caller requests the next generation when the previous one has finished. Closing the generator stops all
    # generations.
    generations: list[Generation] = []
    try:
        for index in range(len(submits)):
            generations += [submit() for submit in submits[len(generations) : index + MAX_BATCHED]]
            yield generations[index]
    finally:
        for generation in generations:
            generation.stop()


def _turns(messages: ChatInput) -> Sequence[Message]:
    # A list of messages may be empty; the template decides whether this is an error.
    if isinstance(messages, Sequence) and not isinstance(messages, str):
        return [conversation(turn)[0] if isinstance(turn, Mapping) else turn for turn in messages]
    return conversation(messages)


def _reject_empty_answer(events: Generator[Event, None, None]) -> Iterator[Event]:
    # Without a chat template, a model trained for conversations often ends a text immediately, which would look like an
    # empty answer.
    tokens = 0
    with closing(events):
        for event in events:
            tokens = event.usage.completion_tokens if event.usage is not None else tokens
            if event.kind == "end" and event.finish_reason == "stop" and event.stop is None and tokens <= 1:
                raise InvalidRequestError(
                    "the model ended this text immediately; use chat for an answer", param="messages"
                )
            yield event


def _require_names(**names: object) -> None:
    for label, name in names.items():
        require(isinstance(name, str) and is_unicode(name), label, "text in valid Unicode")


def _reading_digest(name: str, scope: str | None, owner: str) -> bytes:
    _require_names(name=name, scope="" if scope is None else scope, owner=owner)
    return reading_digest(owner, scope, name)


def _load_template(file: GGUFFile, tokenizer: Tokenizer, path: str | None) -> ChatTemplate | None:
    if path is None:
        return ChatTemplate.from_gguf(file.metadata, tokenizer)
    try:
        source = read_text(Path(path), 4 * MAX_TEMPLATE_CHARACTERS)
        return ChatTemplate.from_gguf(file.metadata, tokenizer, source=source)
    except OSError as error:
        raise TemplateError(f"{path} cannot be read: {error.strerror}") from error
    except NotTextError as error:
        raise TemplateError(f"{path} {error}") from error
    except TemplateError as error:
        raise TemplateError(f"{path}: {error}") from error


def _handle_device_loss(backend: Backend, callbacks: list[Callable[[], None]], error: DeviceLostError) -> None:
    exclude_device(backend, error)
    for callback in callbacks:
        callback()


def _adopt_identity(
    core: EngineCore, offload: KVOffload, version: Callable[[bytes], bytes], identity: ModelIdentity
) -> None:
    with suppress(EngineError):  # the engine was closed in the meantime
        core.post(lambda: offload.adopt(version(identity.current), map(version, identity.earlier)))


def _shut_down(core: EngineCore, placement: WeightPlacement, identity: IdentityWorker | None, file: GGUFFile) -> None:
    try:
        core.require_process()
    except EngineError:  # a forked child has no threads to stop
        return
    if identity is not None:
        identity.stop()
    placement.stop()
    core.close()
    file.close()
