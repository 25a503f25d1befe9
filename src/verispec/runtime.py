"""A loaded model: weights on a backend, tokenizer, chat template, identity, calibration, and the engine that serves it.

Everything that takes long or can fail for the model's sake happens here, when it is loaded: the audit, the cost table
and the menu of skip sets are found before an engine is made, never inside a step.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from verispec.arguments import check_bool, check_int
from verispec.backends.calibration import Calibration, calibrate
from verispec.backends.options import AS_STORED, DRAFT_BITS, BackendOptions
from verispec.backends.protocol import Backend
from verispec.backends.select import (
    OPTIONS,
    check_name,
    default_backend,
    engine_defaults,
    fitting_slots,
    make_backend,
    uses_gpu,
    what_is_lost,
)
from verispec.config import DEFAULTS, MAX_SIZE, EngineConfig
from verispec.constraints import Compiler
from verispec.engine import Engine, Request
from verispec.engine.thread import EngineThread, Status
from verispec.errors import InputError
from verispec.model import DEFAULT_MODEL, Checkpoint, cache_dir, open_checkpoint, resolve
from verispec.model.architecture import Architecture
from verispec.model.file_digest import ModelIdentity
from verispec.model.generation_defaults import generation_defaults
from verispec.model.hub import label
from verispec.model.load import load_tokenizer
from verispec.model.tokenizer import Tokenizer, check_same_vocabulary
from verispec.sampling.constraint import Grammar
from verispec.spec.drafter import Drafter
from verispec.spec.registry import (
    DRAFTER_NAMES,
    LOOKUP_DRAFTER,
    MODEL_DRAFTER,
    SKIP_DRAFTER,
    SUFFIX_DRAFTER,
    DraftSetup,
    check_method,
    default_method,
    make_drafters,
)
from verispec.spec.skip_menu import MenuKey, SkipMenu, has_menus, read_menu
from verispec.spec.speculation import Speculation
from verispec.text.chat_prompt import ChatPrompts
from verispec.types import Accept, SamplingParams

Message = Mapping[str, Any]
LoadProgress = Callable[[str, float], None]
logger = logging.getLogger(__name__)


class _Report:
    """Hands on how far loading is, until it has ended: a backend may go on to report, from another thread."""

    def __init__(self, progress: LoadProgress | None) -> None:
        self._progress = progress

    def __call__(self, stage: str, share: float) -> None:
        if self._progress is not None:
            self._progress(stage, share)

    def end(self) -> None:
        self._progress = None


class Runtime:
    """A loaded model.

    `model` is a known name, a GGUF file or a folder with safetensors. `drafter` is the default of every request (None:
    `auto`; with backends numpy and torch `model` if there is a `draft_model`, else `suffix`); no drafter changes the
    output. `draft_len` is the most tokens of one draft (default: the drafter's own); `force` drafts even where that is
    predicted not to pay.
    `draft_model` is a smaller model with the same vocabulary, for drafter `model`; `tree` is the shape of drafts
    (`chain:N`, `branch:3,2,1`, `beam:3,4`), `accept` the rule that judges them. `kv_slots` is the K/V capacity in
    tokens, `max_len` the most a request may hold, prompt included. `backend` is cuda, native, numpy (default: the first
    that can serve here) or hopper, which gives cuda's bits on a CPU, or torch; cuda and torch run on GPU number
    `device` and take the share `gpu_memory` of its memory, unless `kv_slots` says how much K/V to have. With
    `fast_weights` int4, int8 or fp8, windows of drafter `decode` are drawn by a second set of weights of so many
    bits (cuda). `threads` is how many compute (default: all cores); it changes no bit. `weights="q8"` makes the native
    backend quantise float weights at load, `kv_dtype` is its float16 or float32; both are part of the profile. `family`
    names canonical shapes other than the audit's choice; `full_audit` audits kernels that loading checks by known
    answers only, `fresh_audit` measures again. `progress(stage, share)` reports loading. `history_len` tokens of
    earlier answers are kept for drafter `suffix`; they are kept apart by salt, which is a server's API key, unless
    `share_history` says that all may draft from all: requests then say nothing of their drafts.
    """

    def __init__(
        self,
        model: str | Path = DEFAULT_MODEL,
        *,
        drafter: str | None = None,
        draft_model: str | Path | None = None,
        tree: str | None = None,
        accept: str = Accept.MATCH,
        backend: str | None = None,
        threads: int | None = None,
        weights: str = AS_STORED,
        kv_dtype: str | None = None,
        kv_slots: int | None = None,
        max_len: int | None = None,
        max_running: int | None = None,
        row_budget: int | None = None,
        draft_len: int | None = DEFAULTS.max_draft,
        force: bool = False,
        prefix_cache: bool = True,
        history_len: int = DEFAULTS.history_len,
        share_history: bool = DEFAULTS.shares_history,
        family: Sequence[int] | None = None,
        full_audit: bool = False,
        fresh_audit: bool = False,
        device: int = 0,
        gpu_memory: float = 0.9,
        fast_weights: str = "same",
        progress: LoadProgress | None = None,
    ) -> None:
        report = _Report(progress)
        if draft_len is not None:
            check_int("draft_len", draft_len, 0, MAX_SIZE)
        threads = None if threads is None else check_int("threads", threads, 1, 1024)
        for name, flag in (("force", force), ("full_audit", full_audit), ("fresh_audit", fresh_audit)):
            check_bool(name, flag)
        family = None if family is None else _checked_family(family)
        if backend is None:
            backend = default_backend()
            if (lost := what_is_lost(backend)) is not None:
                logger.warning("%s", lost)
        check_name(backend, check_int("device", device, 0, MAX_SIZE))
        if fast_weights not in DRAFT_BITS:
            raise InputError(f"fast_weights must be {', '.join(DRAFT_BITS)}, not {fast_weights!r}")
        if DRAFT_BITS[fast_weights] and backend != "cuda":
            raise InputError(f"fast_weights {fast_weights} needs the cuda backend; this is the {backend} one")
        if not 0 < gpu_memory <= 1:
            raise InputError(f"gpu_memory must be above 0 and at most 1, not {gpu_memory}")
        named = SUFFIX_DRAFTER if drafter is None else drafter  # which is the default depends on the backend, below
        self._speculation = Speculation.of(named, tree=tree, accept=accept)
        check_method(self._speculation.method)
        if tree is not None and draft_len is not None:
            raise InputError(f"tree {tree} and draft_len exclude each other: both say how long drafts are")
        if drafter == MODEL_DRAFTER and draft_model is None:
            raise InputError(f"drafter {drafter} needs a draft_model")
        if kv_slots is not None:
            check_int("kv_slots", kv_slots, 2, MAX_SIZE)
        sizes = {"num_slots": kv_slots, "max_len": max_len, "max_running": max_running, "row_budget": row_budget}
        self._config = replace(
            engine_defaults(backend),
            max_draft=draft_len,
            prefix_cache=prefix_cache,
            history_len=history_len,
            shares_history=share_history,
            **{name: value for name, value in sizes.items() if value is not None},
        )
        paths = _resolved(model, draft_model, report)
        report("loading", 0.0)
        with ExitStack() as files:
            checkpoints = [files.enter_context(open_checkpoint(path)) for path in paths]
            beside = files.enter_context(ThreadPoolExecutor(1))  # it takes Python's lock, weights do not
            reading = beside.submit(self._read, checkpoints, name=label(model, paths[0]))
            if len(checkpoints) > 1:
                reading.result()  # what is wrong with a draft model's vocabulary is said before weights are read
            if uses_gpu(backend) and kv_slots is None:
                architectures = [c.architecture for c in checkpoints]
                fitting = fitting_slots(
                    architectures, device=device, gpu_memory=gpu_memory, kv_dtype=kv_dtype, fast_weights=fast_weights
                )
                self._config = replace(self._config, num_slots=fitting)
            own: dict[str, Any] = {"device": device} if backend in ("cuda", "torch") else {}
            if backend == "cuda":
                own |= {"cache_folder": cache_dir() / "cuda", "fast_weights": fast_weights}
            options = OPTIONS[backend](
                num_slots=self._config.num_slots, num_seq_rows=self._config.max_running, threads=threads,
                context_len=self._config.num_slots,  # each token takes a slot: tables by position can end there
                weights=weights, kv_dtype=kv_dtype or "", **own,
            )  # fmt: skip
            if not uses_gpu(backend):
                _check_memory(options, checkpoints)
            self._backend: Backend = make_backend(options, checkpoints, progress=report)
            reading.result()
        if drafter is None:
            method = default_method(
                looks_up=self._backend.limits.looks_up,
                has_draft_model=draft_model is not None,
                accept=self._speculation.accept,
                is_forced=force,
            )
            self._speculation = replace(self._speculation, method=method)
        self.calibration: Calibration = calibrate(
            self._backend, cache_dir=cache_dir(), family=family, full=full_audit, fresh=fresh_audit, progress=report
        )
        self._constraints = Compiler(self.tokenizer, self.vocab_size)
        self._chat_prompts: ChatPrompts | None = None
        self._chat_lock = threading.Lock()
        self._force = force
        self._menu: SkipMenu | None = None
        if drafter == SKIP_DRAFTER:
            self._tune_quickly(report)
        report.end()
        self.thread = EngineThread(self.fresh_engine())
        weakref.finalize(self, self.thread.stop, drains=_nothing)

    def _read(self, checkpoints: Sequence[Checkpoint], *, name: str) -> None:
        """What the target's files say beside the weights; a draft model must have the same vocabulary."""
        target, *drafts = checkpoints
        self.tokenizer: Tokenizer = load_tokenizer(target.tokenizer_source)
        self.architecture: Architecture = target.architecture
        _check_vocabulary(self.tokenizer, target)
        for draft in drafts:
            check_same_vocabulary(
                self.tokenizer,
                load_tokenizer(draft.tokenizer_source),
                logits=target.architecture.vocab_size,
                draft_logits=draft.architecture.vocab_size,
            )
        self.generation_defaults: Mapping[str, Any] = generation_defaults(target.tokenizer_source)
        self.identity = ModelIdentity(name, target.stamps())

    @property
    def engine(self) -> Engine:
        """The engine that all calls share, once it is idle. It may then be replaced, or driven by hand."""
        return self.thread.idle_engine

    @engine.setter
    def engine(self, engine: Engine) -> None:
        with self.thread.alone():
            self.thread.engine = engine

    @property
    def max_len(self) -> int:
        """The most tokens a request can hold, prompt included."""
        return self.thread.engine.max_len

    def status(self) -> Status:
        """What the engine has to do now."""
        return self.thread.status()

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
        return MenuKey(model, self._backend.fingerprint(), self._backend.device())

    @property
    def drafter_names(self) -> tuple[str, ...]:
        """The drafters that can draft here: `skip` needs a menu, `model` a draft model, `lookup` a backend for it."""
        missing = {MODEL_DRAFTER} if self.calibration.draft_cost is None else set()
        if not self._backend.limits.looks_up:
            missing.add(LOOKUP_DRAFTER)
        if self.skip_menu() is None:
            missing.add(SKIP_DRAFTER)
        return tuple(name for name in DRAFTER_NAMES if name not in missing)

    @property
    def vocab_size(self) -> int:
        """Tokens the model has logits for."""
        return self._backend.limits.vocab_size

    @property
    def row_budget(self) -> int:
        """The most rows of one canonical pass."""
        return self._config.row_budget

    @property
    def longest(self) -> int:
        """The most `max_len` an engine of this LLM can have: the model's context, or the K/V capacity."""
        return min(self._backend.limits.context_len, self._config.num_slots)

    def fresh_engine(
        self, *, drafters: Mapping[str, Drafter] | None = None, family: Sequence[int] | None = None, **changes: Any
    ) -> Engine:
        """A further engine on the same weights, with an empty cache; `changes` are fields of EngineConfig.

        `drafters` stand in for the known ones, `family` for all canonical shapes that were found: some of them. All
        engines of one LLM share the K/V store: use one at a time, to its end.
        """
        config = replace(self._config, **changes)
        return Engine(
            self._backend,
            family=self.calibration.family if family is None else family,
            cost=self.calibration.cost,
            drafters=drafters or make_drafters(self._draft_setup(config)),
            default_drafter=None if drafters else self._speculation.method,
            config=config,
            no_family_reason=self.calibration.no_family_reason,
        )

    def _draft_setup(self, config: EngineConfig) -> DraftSetup:
        menu = self.skip_menu()  # now: looking for it may read the whole model
        return DraftSetup(
            draft_len=config.max_draft,
            backend=self._backend,
            cost=self.calibration.cost,
            find_menu=lambda: menu,
            draft_cost=self.calibration.draft_cost,
            force=self._force,
            history_len=config.history_len,
            shares_history=config.shares_history,
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
        if self._menu is None and has_menus(cache_dir(), self._backend.fingerprint(), self._backend.device()):
            return read_menu(cache_dir(), self.menu_key)
        return self._menu

    @contextmanager
    def separate_engine(self, **changes: Any) -> Iterator[Engine]:
        """A `fresh_engine` with these changes to use inside the block. This LLM's own starts anew behind it, with an
        empty cache.

        Waits for requests that run; others wait for the block's end.
        """
        with self.thread.alone():
            self.thread.engine = self.fresh_engine()  # what the old one has cached will be overwritten
            yield self.fresh_engine(**changes)

    def chat_ids(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """The prompt tokens of a conversation. Control tokens written inside messages stay text.

        `options` are those of `ChatPrompts.ids`: `tools`, `variables` of the template, where the prompt ends.
        """
        with self._chat_lock:
            if self._chat_prompts is None:
                self._chat_prompts = ChatPrompts(self.tokenizer)
            return self._chat_prompts.ids(messages, **options)

    def grammar(self, params: SamplingParams) -> Grammar | None:
        """What answers with these parameters must look like, compiled and kept; None if that is up to the model.

        Raises ConstraintError, with the place of what is wrong in a schema.
        """
        return None if params.constraint is None else self._constraints.compile(params.constraint)

    def close(self) -> None:
        """Give back the model's memory; keep what passes were seen to cost.

        Waits for the batches of other threads; streams that are open end here.
        """
        self.thread.stop(drains=lambda request: not request.is_streamed)
        self.calibration.save()
        self._backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _nothing(request: Request) -> bool:
    return False


def _resolved(model: str | Path, draft_model: str | Path | None, report: LoadProgress) -> list[Path]:
    """Where the models are, fetched if they must be."""
    for name, place in (("model", model), ("draft_model", draft_model or "")):
        if not isinstance(place, str | Path):
            raise InputError(f"{name} must be a name or a path, not {type(place).__name__}")

    def found(place: str | Path) -> Path:
        return resolve(place, progress=lambda stage, done, total: report(stage, done / max(1, total)))

    paths = [found(model)]
    if draft_model is not None:
        try:
            paths.append(found(draft_model))
        except InputError as error:
            raise InputError(f"draft_model: {error}") from error
    return paths


def _checked_family(family: object) -> list[int]:
    if not isinstance(family, Iterable) or isinstance(family, str | bytes):
        raise InputError(f"family must be a list of shapes, not {type(family).__name__}")
    return [check_int("family", shape, 1, MAX_SIZE) for shape in family]


def _check_memory(options: BackendOptions, checkpoints: Sequence[Checkpoint]) -> None:
    """Refuse more K/V than the machine has memory, before the system ends the process for it."""
    kv_slots, width = options.num_slots, 4 if options.kv_dtype == "float32" else 2
    needed = 0
    for arch in (c.architecture for c in checkpoints):
        needed += kv_slots * arch.num_layers * arch.num_kv_heads * arch.head_dim * 2 * width
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > available:
        raise InputError(
            f"kv_slots = {kv_slots:,} takes {needed / 2**30:,.1f} GiB for K and V; this machine has "
            f"{available / 2**30:,.1f} GiB of memory"
        )


def _check_vocabulary(tokenizer: Tokenizer, checkpoint: Checkpoint) -> None:
    if tokenizer.vocab_size > checkpoint.architecture.vocab_size:
        raise InputError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model's logits only "
            f"{checkpoint.architecture.vocab_size}"
        )
