"""The Python interface: a model, an engine and a tokenizer behind `generate`, `stream`, `chat` and `score`.

Everything here is assembly; what decides tokens lives in the engine. An LLM serves any number of threads, all of them
by one engine; several streams of it may be open at once, and whichever is read drives the engine for all.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, overload

from verispec.arguments import check_bool, check_int
from verispec.backends.calibration import Calibration, calibrate
from verispec.backends.protocol import Backend
from verispec.backends.select import AS_STORED, BackendOptions, check_name, default_backend, make_backend
from verispec.config import DEFAULTS, MAX_SIZE, EngineConfig
from verispec.engine import Engine, Request
from verispec.errors import InputError, NumericError, QueueFullError
from verispec.model import DEFAULT_MODEL, Checkpoint, cache_dir, open_checkpoint, resolve
from verispec.model.architecture import Architecture
from verispec.model.generation_defaults import generation_defaults
from verispec.model.hub import label
from verispec.model.identity import ModelIdentity
from verispec.model.load import load_tokenizer
from verispec.model.tokenizer import Tokenizer
from verispec.model.vocabulary import check_same_vocabulary
from verispec.prompts import Params, Prompt, PromptSpec, pair, spec
from verispec.receipt.values import Receipt, check_recordable, make_receipt
from verispec.shared_engine import Inbox, SharedEngine
from verispec.spec.drafter import Drafter
from verispec.spec.registry import DRAFTER_NAMES, MODEL_DRAFTER, SKIP_DRAFTER, DraftSetup, check_method, make_drafters
from verispec.spec.skip_menu import MenuKey, SkipMenu, read_menu
from verispec.spec.speculation import Speculation
from verispec.text.chat_prompt import ChatPrompts
from verispec.text.detokenizer import TextStream
from verispec.types import (
    MAX_ALTERNATIVES,
    Accept,
    FinishReason,
    SampleOutput,
    SamplingParams,
    SequenceStats,
    TokenEvent,
    TokenLogprob,
)

Message = Mapping[str, Any]
LoadProgress = Callable[[str, float], None]
logger = logging.getLogger(__name__)
Speculative = Mapping[str, Any] | bool | None


@dataclass(frozen=True, slots=True, repr=False)
class Completion:
    """All samples of one prompt, with what is needed to get them again. The short names speak of sample 0.

    `receipts` are those that were asked for, one per sample; a sample that failed has none. Two are equal if prompt,
    profile and what was generated are: seeds, times, counters and receipts are not compared.
    """

    prompt_ids: tuple[int, ...]
    samples: tuple[SampleOutput, ...]
    profile: str
    receipts: tuple[Receipt, ...] = field(default=(), compare=False)

    def __repr__(self) -> str:
        more = f", samples={len(self.samples)}" if len(self.samples) > 1 else ""
        return f"Completion({self.samples[0].summary}{more})"

    @property
    def text(self) -> str:
        """The generated text, without EOS and without the stop string."""
        return self.samples[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The generated tokens, the stopping one included."""
        return self.samples[0].token_ids

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """One entry per generated token."""
        return self.samples[0].logprobs

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """One entry per prompt token after the first, if they were asked for."""
        return self.samples[0].prompt_logprobs

    @property
    def finish_reason(self) -> FinishReason:
        """Why generation ended."""
        return self.samples[0].finish_reason

    @property
    def error(self) -> str | None:
        """What went wrong, if the finish reason is `error`."""
        return self.samples[0].error

    @property
    def seed(self) -> int:
        """The seed that gives this output again."""
        return self.samples[0].seed

    @property
    def digest(self) -> str:
        """SHA-256 over output ids and log-probabilities."""
        return self.samples[0].digest

    @property
    def stats(self) -> SequenceStats:
        """Passes, drafts and times."""
        return self.samples[0].stats


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """Log-probabilities of given tokens: one entry per token after the first."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-probability."""
        return math.exp(-sum(entry.logprob for entry in self.logprobs) / len(self.logprobs))


class LLM:
    """A loaded model, ready to generate.

    `model` is a known name, a GGUF file or a folder with safetensors. `drafter` is the default of every request; no
    drafter changes the output. `draft_len` is the most tokens of one draft (default: the drafter's own); `force` drafts
    even where that is predicted not to pay. `draft_model` is a smaller model with the same vocabulary, for drafter
    `model`; `tree` is the shape of drafts (`chain:N`, `branch:3,2,1`, `beam:3,4`), `accept` the rule that judges them.
    `kv_slots` is the K/V capacity in tokens, `max_len` the most a request may hold, prompt included. `backend` is
    native or numpy (default: native where it was built). `threads` is how many compute (default: all cores); it changes
    no bit. `weights="q8"` makes the native backend quantise float weights at load, `kv_dtype` is float16 or float32;
    both are part of the profile. `family` names canonical shapes other than the audit's choice; `full_audit` audits
    kernels that loading checks by known answers only, `fresh_audit` measures again. `progress(stage, share)` reports
    loading.
    """

    def __init__(
        self,
        model: str | Path = DEFAULT_MODEL,
        *,
        drafter: str = "ngram",
        draft_model: str | Path | None = None,
        tree: str | None = None,
        accept: str = Accept.MATCH,
        backend: str | None = None,
        threads: int | None = None,
        weights: str = AS_STORED,
        kv_dtype: str | None = None,
        kv_slots: int = DEFAULTS.num_slots,
        max_len: int | None = None,
        max_running: int = DEFAULTS.max_running,
        row_budget: int = DEFAULTS.row_budget,
        draft_len: int | None = DEFAULTS.max_draft,
        force: bool = False,
        prefix_cache: bool = True,
        family: Sequence[int] | None = None,
        full_audit: bool = False,
        fresh_audit: bool = False,
        progress: LoadProgress | None = None,
    ) -> None:
        report = progress or (lambda stage, share: None)
        check_int("kv_slots", kv_slots, 2, MAX_SIZE)
        if draft_len is not None:
            check_int("draft_len", draft_len, 0, MAX_SIZE)
        threads = None if threads is None else check_int("threads", threads, 1, 1024)
        for name, flag in (("force", force), ("full_audit", full_audit), ("fresh_audit", fresh_audit)):
            check_bool(name, flag)
        for name, place in (("model", model), ("draft_model", draft_model or "")):
            if not isinstance(place, str | Path):
                raise InputError(f"{name} must be a name or a path, not {type(place).__name__}")
        family = None if family is None else _checked_family(family)
        backend = default_backend() if backend is None else backend
        check_name(backend)
        speculation = Speculation.of(drafter, tree=tree, accept=accept)
        check_method(speculation.method)
        if tree is not None and draft_len is not None:
            raise InputError(f"tree {tree} and draft_len exclude each other: draft_len N is short for chain:N")
        if drafter == MODEL_DRAFTER and draft_model is None:
            raise InputError(f"drafter {drafter} needs a draft_model")
        config = EngineConfig(
            num_slots=kv_slots,
            max_len=max_len,
            max_running=max_running,
            row_budget=row_budget,
            max_draft=draft_len,
            prefix_cache=prefix_cache,
        )
        paths = [_resolved(model, report)]
        if draft_model is not None:
            try:
                paths.append(_resolved(draft_model, report))
            except InputError as error:
                raise InputError(f"draft_model: {error}") from error
        report("loading", 0.0)
        with ExitStack() as files:
            checkpoints = [files.enter_context(open_checkpoint(path)) for path in paths]
            self.tokenizer: Tokenizer = load_tokenizer(checkpoints[0].tokenizer_source)
            _check_vocabulary(self.tokenizer, checkpoints[0])
            self.generation_defaults: Mapping[str, Any] = generation_defaults(checkpoints[0].tokenizer_source)
            for draft in checkpoints[1:]:
                check_same_vocabulary(
                    self.tokenizer,
                    load_tokenizer(draft.tokenizer_source),
                    logits=checkpoints[0].architecture.vocab_size,
                    draft_logits=draft.architecture.vocab_size,
                )
            self.identity = ModelIdentity.of(checkpoints[0], name=label(model, paths[0]))
            self.architecture: Architecture = checkpoints[0].architecture
            _check_memory(kv_slots, checkpoints, kv_dtype or ("float32" if backend == "numpy" else "float16"))
            set_up = BackendOptions(config.num_slots, config.max_running, threads, weights, kv_dtype)
            self._backend: Backend = make_backend(backend, checkpoints, set_up, progress=report)
        self.calibration: Calibration = calibrate(
            self._backend, cache_dir=cache_dir(), family=family, full=full_audit, fresh=fresh_audit, progress=report
        )
        self._config = config
        self._chat_prompts: ChatPrompts | None = None
        self._chat_lock = threading.Lock()
        self._speculation = speculation
        self._force = force
        self._menu: SkipMenu | None = None
        if drafter == SKIP_DRAFTER:
            self._tune_quickly(report)
        self._shared = SharedEngine(self.fresh_engine())

    @property
    def engine(self) -> Engine:
        """The engine that all calls share. It may be replaced, or driven by hand, while nothing else uses this LLM."""
        return self._shared.engine

    @engine.setter
    def engine(self, engine: Engine) -> None:
        self._shared.engine = engine

    @property
    def profile(self) -> str:
        """The hash of the numeric profile: equal hashes give equal bytes."""
        return self.calibration.profile.hash

    @property
    def backend(self) -> Backend:
        """What runs the model."""
        return self._backend

    @property
    def menu_key(self) -> MenuKey:
        """What a menu of skip sets is kept under. Reads the model's files, once."""
        joined = "\n".join(f"{f.name} {f.sha256}" for f in self.identity.files)
        model = hashlib.sha256(joined.encode()).hexdigest()
        return MenuKey.of(model, self._backend.fingerprint(), self._backend.device())

    @property
    def drafter_names(self) -> tuple[str, ...]:
        """The drafters that can draft here: `skip` needs a menu, `model` a draft model."""
        missing = {MODEL_DRAFTER} if self.calibration.draft_cost is None else set()
        if self.skip_menu() is None:
            missing.add(SKIP_DRAFTER)
        return tuple(name for name in DRAFTER_NAMES if name not in missing)

    @property
    def vocab_size(self) -> int:
        """Tokens the model has logits for."""
        return self._backend.limits.vocab_size

    @property
    def longest(self) -> int:
        """The most `max_len` an engine of this LLM can have: the model's context, or the K/V capacity."""
        return min(self._backend.limits.context_len, self._config.num_slots)

    def fresh_engine(self, *, drafters: Mapping[str, Drafter] | None = None, **changes: Any) -> Engine:
        """A further engine on the same weights, with an empty cache; `changes` are fields of EngineConfig.

        `drafters` stand in for the known ones. All engines of one LLM share the K/V store: use one at a time, to its
        end.
        """
        config = replace(self._config, **changes)
        return Engine(
            self._backend,
            family=self.calibration.family,
            cost=self.calibration.cost,
            drafters=drafters or make_drafters(self._draft_setup(config.max_draft)),
            default_drafter=None if drafters else self._speculation.method,
            config=config,
            no_family_reason=self.calibration.no_family_reason,
        )

    def _draft_setup(self, draft_len: int | None) -> DraftSetup:
        return DraftSetup(
            draft_len=draft_len,
            backend=self._backend,
            cost=self.calibration.cost,
            find_menu=self.skip_menu,
            draft_cost=self.calibration.draft_cost,
            force=self._force,
        )

    def _tune_quickly(self, report: LoadProgress) -> None:
        """See to it that there is a menu of skip sets. One that was tuned before is kept."""
        from verispec.tuning import Subject, quick_menu

        try:
            self._menu = quick_menu(Subject.of(self), key=self.menu_key, cache_dir=cache_dir(), progress=report)
        except InputError as error:  # too little room to tune in is no reason not to generate
            logger.warning("no skip sets: %s", error)

    def skip_menu(self) -> SkipMenu | None:
        """The skip sets that were tuned for this model and device, if any were."""
        return self._menu or read_menu(cache_dir(), self.menu_key)

    @contextmanager
    def separate_engine(self, *, drafters: Mapping[str, Drafter] | None = None, **changes: Any) -> Iterator[Engine]:
        """A `fresh_engine` to use inside the block. This LLM's own starts anew behind it, with an empty cache.

        Waits for the calls of other threads; theirs wait for the block's end. Raises InputError while streams are open:
        their K/V would be overwritten.
        """
        with self._shared.alone():
            try:
                yield self.fresh_engine(drafters=drafters, **changes)
            finally:
                self.engine = self.fresh_engine()

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: Params | Sequence[Params] | None = None,
        *,
        drafter: str | None = None,
        speculative: Speculative = None,
        on_finish: Callable[[int, Completion], None] | None = None,
        receipts: bool = False,
    ) -> list[Completion]:
        """Complete one prompt or many as one batch; results in input order.

        Prompts are text, token ids, or dicts in the form of a line of `generate --prompts`: `{"prompt": ...}`, with
        `token_ids` or `messages` instead, and parameters of its own. One set of parameters serves all prompts, or
        there is one per prompt; a dict of its fields will do.
        `drafter` names another drafter; `speculative` says all of it: `{"method", "tree", "accept"}`, or False.
        `on_finish(index, completion)` is called as each ends. Interrupted, it frees everything it started. With
        `receipts`, which only deterministic requests can have, each completion holds one per sample.
        """
        speculation = self._chosen(drafter, speculative)
        requests = [self._request(each, speculation) for each in pair(prompts, params)]
        return self.run(requests, on_finish=on_finish, receipts=receipts)

    def run(
        self,
        requests: Sequence[Request],
        *,
        on_finish: Callable[[int, Completion], None] | None = None,
        receipts: bool = False,
    ) -> list[Completion]:
        """`generate` for requests made by `request`: a batch whose prompts may name different drafters."""
        for request in requests:
            if not isinstance(request, Request):
                raise InputError(f"requests must be made by `request`, not {type(request).__name__}")
            if receipts:
                check_recordable(request.params)
        waiting = deque(enumerate(requests))
        live: dict[int, Inbox] = {}
        samples: dict[int, list[SampleOutput]] = {}
        done: dict[int, Completion] = {}
        try:
            while waiting or live:
                self._fill(waiting, live)
                for index, inbox in list(live.items()):
                    for event in inbox.take():
                        if event.output is not None:
                            samples.setdefault(index, []).append(event.output)
                    if len(samples.get(index, ())) == requests[index].params.n:
                        self._shared.close_request(live.pop(index))
                        done[index] = self._completion(requests[index], samples.pop(index), receipts=receipts)
                        if on_finish is not None:
                            on_finish(index, done[index])
                if live or waiting:
                    self._shared.step()
        finally:
            for inbox in live.values():
                self._shared.close_request(inbox)
        return [done[i] for i in range(len(requests))]

    def _fill(self, waiting: deque[tuple[int, Request]], live: dict[int, Inbox]) -> None:
        """Move requests into the engine's queue while it has room for them."""
        while waiting and self.engine.has_room(waiting[0][1].params):
            index, request = waiting[0]
            live[index] = Inbox()  # known before it is open, so that an interrupt leaves nothing behind
            try:
                self._shared.open(replace(request, is_streamed=False), live[index])
            except QueueFullError:  # another thread was faster
                del live[index]
                return
            waiting.popleft()

    def stream(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        drafter: str | None = None,
        speculative: Speculative = None,
        trace: bool = False,
    ) -> Iterator[TokenEvent]:
        """Complete one prompt, giving each commit as it happens; the last event carries the whole output.

        Closing the iterator aborts the request. With `trace`, events tell of the drafts that were judged.
        """
        request = self.request(prompt, params, drafter=drafter, speculative=speculative)
        return self._stream(replace(request, is_traced=trace))

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        params: Params | None = None,
        *,
        drafter: str | None = None,
        speculative: Speculative = None,
    ) -> Completion: ...

    @overload
    def chat(
        self,
        messages: Sequence[Sequence[Message]],
        params: Params | Sequence[Params] | None = None,
        *,
        drafter: str | None = None,
        speculative: Speculative = None,
    ) -> list[Completion]: ...

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params | Sequence[Params] | None = None,
        *,
        drafter: str | None = None,
        speculative: Speculative = None,
    ) -> Completion | list[Completion]:
        """Answer a conversation through the model's chat template, or a list of them, as one batch."""
        many = _are_conversations(messages)
        conversations: Any = messages if many else [messages]
        prompts = [self.chat_ids(conversation) for conversation in conversations]
        completions = self.generate(prompts, params, drafter=drafter, speculative=speculative)
        return completions if many else completions[0]

    def chat_stream(
        self,
        messages: Sequence[Message],
        params: Params | None = None,
        *,
        drafter: str | None = None,
        speculative: Speculative = None,
    ) -> Iterator[TokenEvent]:
        """`chat`, streamed."""
        return self.stream(self.chat_ids(messages), params, drafter=drafter, speculative=speculative)

    def chat_ids(self, messages: Sequence[Message]) -> list[int]:
        """The prompt tokens of a conversation. Control tokens written inside messages stay text."""
        with self._chat_lock:
            if self._chat_prompts is None:
                self._chat_prompts = ChatPrompts(self.tokenizer)
            return self._chat_prompts.ids(messages)

    def request(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        drafter: str | None = None,
        speculative: Speculative = None,
    ) -> Request:
        """The engine's request for a prompt. Raises InputError if this model can never serve it."""
        return self._request(spec(prompt, params), self._chosen(drafter, speculative))

    def _request(self, prompt: PromptSpec, speculation: Speculation) -> Request:
        self._shared.check_open()
        params, ids = prompt.params, prompt.content
        if ids is None:
            ids = self.chat_ids(prompt.messages)
        request = Request(
            prompt_ids=self.tokenizer.encode(ids) if isinstance(ids, str) else ids,
            params=params,
            speculation=speculation,
            eos_ids=self.tokenizer.eos_ids,
            text=lambda: TextStream(self.tokenizer, params.stop),
        )
        self.engine.validate(request)
        return request

    def _chosen(self, drafter: str | None, speculative: Speculative) -> Speculation:
        """What a request asks for, or the default; naming the default's drafter keeps its tree and rule."""
        if drafter is not None and speculative is not None:
            raise InputError("drafter and speculative exclude each other")
        named = drafter is not None and drafter != self._speculation.method
        chosen = Speculation.parse({"method": drafter} if named else speculative, self._speculation)
        if chosen.method == MODEL_DRAFTER and self.calibration.draft_cost is None:
            raise InputError("drafter model needs a draft_model")
        return chosen

    def receipt(self, prompt: Prompt, params: Params, output: SampleOutput) -> Receipt:
        """The receipt of an answer that was streamed; `output` came with its last event."""
        return self._receipt(self.request(prompt, params, speculative=False), output)

    def score(self, prompt: Prompt, *, alternatives: int = 0) -> ScoreResult:
        """Log-probabilities of the given tokens under the model, in parallel canonical passes."""
        check_int("alternatives", alternatives, 0, MAX_ALTERNATIVES)
        params = SamplingParams(max_tokens=0, prompt_logprobs=alternatives)
        (completion,) = self.generate([prompt], params, drafter="none")
        if completion.prompt_logprobs is None or completion.error is not None:
            raise NumericError(completion.error or "the model gave no log-probabilities")
        return ScoreResult(completion.prompt_ids, completion.prompt_logprobs)

    def close(self) -> None:
        """Give back the model's memory; keep what passes were seen to cost.

        Waits for the calls of other threads; streams that are open end here.
        """
        self._shared.close(self._release)

    def _release(self) -> None:
        self.calibration.save()
        self._backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _stream(self, request: Request) -> Iterator[TokenEvent]:
        inbox = Inbox(is_stream=True)
        finished = 0
        try:
            self._shared.open(request, inbox)
            while finished < request.params.n:
                for event in inbox.take():
                    finished += event.output is not None
                    yield event
                if finished < request.params.n:
                    self._shared.step()
        finally:
            self._shared.close_request(inbox)

    def _completion(self, request: Request, samples: Iterable[SampleOutput], *, receipts: bool) -> Completion:
        ordered = tuple(sorted(samples, key=lambda s: s.sample_index))
        recorded = [s for s in ordered if receipts and s.finish_reason is not FinishReason.ERROR]
        return Completion(
            tuple(request.prompt_ids), ordered, self.profile, tuple(self._receipt(request, s) for s in recorded)
        )

    def _receipt(self, request: Request, output: SampleOutput) -> Receipt:
        return make_receipt(
            model=self.identity,
            profile=self.calibration.profile,
            prompt_ids=request.prompt_ids,
            params=request.params,
            max_len=self.engine.max_len,
            eos_ids=request.eos_ids,
            output=output,
        )


def _resolved(model: str | Path, report: LoadProgress) -> Path:
    """Where the model is, fetched if it must be."""
    return resolve(model, progress=lambda stage, done, total: report(stage, done / max(1, total)))


def _checked_family(family: object) -> list[int]:
    if not isinstance(family, Iterable) or isinstance(family, str | bytes):
        raise InputError(f"family must be a list of shapes, not {type(family).__name__}")
    return [check_int("family", shape, 1, MAX_SIZE) for shape in family]


def _check_memory(kv_slots: int, checkpoints: Sequence[Checkpoint], kv_dtype: str) -> None:
    """Refuse more K/V than the machine has memory, before the system ends the process for it."""
    width = {"float16": 2, "float32": 4}.get(kv_dtype, 0)  # others are refused by the backend
    needed = 0
    for arch in (c.architecture for c in checkpoints):
        needed += kv_slots * arch.num_layers * arch.num_kv_heads * arch.head_dim * 2 * width
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > available:
        raise InputError(
            f"kv_slots = {kv_slots:,} takes {needed / 2**30:,.1f} GiB for K and V; this machine has "
            f"{available / 2**30:,.1f} GiB of memory"
        )


def _are_conversations(messages: object) -> bool:
    """Whether these are lists of messages, not messages. What is neither is taken for one, and refused as such."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        return False
    return all(isinstance(each, Sequence) and not isinstance(each, str) for each in messages)


def _check_vocabulary(tokenizer: Tokenizer, checkpoint: Checkpoint) -> None:
    if tokenizer.vocab_size > checkpoint.architecture.vocab_size:
        raise InputError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model's logits only "
            f"{checkpoint.architecture.vocab_size}"
        )
