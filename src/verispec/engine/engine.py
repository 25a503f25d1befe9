"""The engine: a synchronous, single-threaded, sans-IO state machine. `add`, `step`, `abort`, and nothing else.

The clock, the source of random seeds and the backend come in from outside, so a whole run can be simulated from a seed.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from numbers import Integral

from verispec.backends.cost import FLAT_COST, CostTable
from verispec.backends.protocol import Backend
from verispec.config import EngineConfig
from verispec.engine.assignment import Assigner
from verispec.engine.judging import judge_plan
from verispec.engine.planner import Planner
from verispec.engine.scheduler import Scheduler
from verispec.engine.sequence import Prompt, Sequence
from verispec.errors import DeterminismError, InputError, QueueFullError
from verispec.kv import NUM_RESERVED, NoPrefixCache, PrefixCache, RadixPrefixCache, SlotPool
from verispec.sampling.rows import SampleKey
from verispec.spec.drafter import AUTO, Drafter, DrafterSet
from verispec.spec.plan import Plan
from verispec.spec.verifier import Scores, Verifier
from verispec.tree import TreeShape
from verispec.types import (
    Accept,
    FinishReason,
    NoText,
    SamplingParams,
    SequenceStats,
    TextSink,
    TokenEvent,
    Totals,
)


@dataclass(frozen=True, slots=True)
class Request:
    """What a caller asks for. `text` makes one sink per sample; without it the request is about token ids alone.

    `tree` is the shape of drafts, for drafters that have probabilities; `accept` the rule that judges them. Events of
    a request that `is_traced` tell of its drafts. The `params.n` samples are those from number `first_sample` on.
    """

    prompt_ids: SequenceOf[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    drafter: str | None = None
    tree: TreeShape | None = None
    accept: Accept = Accept.MATCH
    is_traced: bool = False
    eos_ids: Iterable[int] = ()
    text: Callable[[], TextSink] = NoText
    first_sample: int = 0

    def __post_init__(self) -> None:
        if self.accept not in tuple(Accept):
            raise InputError(f"unknown accept {self.accept!r}; known: {', '.join(Accept)}")
        object.__setattr__(self, "accept", Accept(self.accept))


class Engine:
    """Requests in, committed tokens out.

    `family` are the backend's canonical shapes (the audit's choice), `cost` its T(M, context). Without a family only
    requests that ask for no determinism are served; others are refused with `no_family_reason`. `drafters` are by name;
    requests that name none get `default_drafter`, or the first.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        family: SequenceOf[int],
        drafters: Mapping[str, Drafter],
        default_drafter: str | None = None,
        config: EngineConfig | None = None,
        cost: CostTable = FLAT_COST,
        no_family_reason: str = "no shape of a pass is row-pure on this backend",
        clock: Callable[[], float] = time.monotonic,
        random_seed: Callable[[], int] = lambda: secrets.randbits(53),
    ) -> None:
        config = config or EngineConfig(num_slots=backend.limits.num_slots)
        shapes = tuple(m for m in sorted(family) if m <= config.row_budget) or tuple(sorted(family))[:1]
        row_budget = max(shapes, default=config.row_budget)
        self.max_len = _max_len(backend, config)
        self._backend = backend
        self._config = config
        self._clock = clock
        self._random_seed = random_seed
        self._pool = SlotPool(config.num_slots)
        num_stores = backend.limits.num_stores
        self._cache: PrefixCache = (
            RadixPrefixCache(self._pool, num_stores) if config.prefix_cache else NoPrefixCache(num_stores)
        )
        self._no_family_reason = "" if shapes else no_family_reason
        self._drafters = DrafterSet(drafters, vocab_size=backend.limits.vocab_size, max_tail=backend.limits.max_tail)
        self._default_drafter = default_drafter or self._drafters.names[0]
        if self._default_drafter not in self._drafters.names:
            raise InputError(f"unknown drafter {default_drafter!r}; known: {', '.join(self._drafters.names)}")
        self._scheduler = Scheduler(
            pool=self._pool,
            cache=self._cache,
            assigner=Assigner(Planner(shapes, cost), self._drafters, row_budget, config.max_draft),
            max_running=min(config.max_running, row_budget, backend.limits.num_seq_rows),
            has_family=bool(shapes),
        )
        self._verifier = Verifier(backend, family=shapes, cost=cost, clock=clock)
        self._ended_totals = Totals()
        self._live: dict[int, list[Sequence]] = {}
        self._ended: list[TokenEvent] = []
        self._next_request_id = 0
        self._next_sequence_id = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._live or self._ended)

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._scheduler.waiting)

    @property
    def num_running(self) -> int:
        """Sequences that hold slots."""
        return len(self._scheduler.running)

    def has_room(self, params: SamplingParams) -> bool:
        """Whether the queue can take a request with these parameters now."""
        return self.num_waiting + params.n <= self._config.max_waiting

    def add(self, request: Request) -> int:
        """Queue a request; returns its id. Raises InputError for a bad one, QueueFullError when there is no room."""
        self.validate(request)
        if not self.has_room(request.params):
            raise QueueFullError(f"the queue is full: {self.num_waiting} of {self._config.max_waiting} places taken")
        params = request.params
        request_id, self._next_request_id = self._next_request_id, self._next_request_id + 1
        seed = self._random_seed() if params.seed is None else params.seed
        prompt = Prompt.of(request.prompt_ids)
        limit = self.max_len if params.max_tokens is None else len(prompt.token_ids) + params.max_tokens
        stopping_ids = frozenset(params.stop_ids) | (frozenset() if params.ignore_eos else frozenset(request.eos_ids))
        samples: list[Sequence] = []
        for sample_index in range(params.n):  # all are made before any is queued: making one may fail
            sequence = Sequence(
                sequence_id=self._next_sequence_id + sample_index,
                request_id=request_id,
                sample_key=SampleKey(seed, request.first_sample + sample_index),
                params=params,
                prompt=prompt,
                stopping_ids=stopping_ids,
                max_len=min(self.max_len, limit),
                drafter=request.drafter or self._default_drafter,
                tree=request.tree,
                accept=request.accept,
                is_traced=request.is_traced,
                text_sink=request.text(),
                stats=SequenceStats(arrival_time=self._clock()),
                leader=samples[0] if samples and self._config.prefix_cache else None,
            )
            samples.append(sequence)
        for sequence in samples:
            self._scheduler.add(sequence)
        self._next_sequence_id += params.n
        self._live[request_id] = samples
        return request_id

    def step(self) -> list[TokenEvent]:
        """Draft, verify, accept, commit: one round for everything that runs. Returns what became visible."""
        plan = self._scheduler.plan()
        drafts = self._drafters.advance(plan)
        scores = self._verifier.run(plan, drafts)
        verdicts, scores = judge_plan(plan, drafts, scores)
        self._scheduler.commit(plan, drafts, scores, verdicts)
        self._drafters.observe(plan, drafts, verdicts)
        _note_stalls(plan, scores)
        return self._events()

    @property
    def totals(self) -> Totals:
        """Counters over all requests so far, live ones included."""
        totals = self._ended_totals.copy()
        for samples in self._live.values():
            for sequence in samples:
                totals.add(sequence.stats, len(sequence.output))
        return totals

    def abort(self, request_id: int) -> bool:
        """End a request now and free its slots. Its last events come with the next step. False if it has ended."""
        samples = list(self._live.get(request_id, ()))
        for sequence in samples:
            sequence.finish(FinishReason.ABORT)
            self._scheduler.remove(sequence)
            self._scheduler.changed.pop(sequence.sequence_id, None)
            self._ended.append(self._event(sequence))
        return bool(samples)

    def check(self) -> None:
        """Raise if the books do not balance: every slot held is reachable from a sequence, a lease or the cache."""
        self._pool.check()
        self._cache.check()
        expected = [0] * (self._pool.num_slots + NUM_RESERVED)
        for holder in (*(s.slots for s in self._scheduler.running), *(lease.slots for lease in self._pool.leases)):
            for slot in holder:
                expected[slot] += 1
        for slot in self._cache.slots():
            expected[slot] += 1
        wrong = [s for s, count in enumerate(expected) if count != self._pool.refs(s)]
        if wrong:
            raise AssertionError(f"slots {wrong[:5]} are referenced {[self._pool.refs(s) for s in wrong[:5]]} times")
        if any(s.slots or s.lease or s.window for s in self._scheduler.waiting):
            raise AssertionError("a waiting sequence holds slots")
        for s in self._scheduler.running:
            if not s.is_in_flight and len(s.lease.slots if s.lease else ()) != len(s.window or ()):
                raise AssertionError("a lease between steps holds one slot per token of its window")

    def _events(self) -> list[TokenEvent]:
        """What nobody has been told yet, also of a commit that was interrupted."""
        events = self._ended + [self._event(sequence) for sequence in self._scheduler.changed.values()]
        self._ended = []
        self._scheduler.changed.clear()
        return events

    def _event(self, sequence: Sequence) -> TokenEvent:
        now = self._clock()
        if sequence.finish_reason is not None:
            sequence.stats.finish_time = now
            self._drafters.forget(sequence)
            samples = self._live[sequence.request_id]
            samples.remove(sequence)
            if not samples:
                del self._live[sequence.request_id]
        event = sequence.take_event()
        sequence.stats.record_commit(now, len(event.logprobs))
        if sequence.finish_reason is not None:
            self._ended_totals.add(sequence.stats, len(sequence.output))
        return event

    def validate(self, request: Request) -> None:
        """Raise InputError, naming what is wrong, if this engine can never serve the request."""
        vocab_size, num_prompt = self._backend.limits.vocab_size, len(request.prompt_ids)
        if not num_prompt:
            raise InputError("the prompt is empty; it needs at least one token")
        for token_id in request.prompt_ids:
            if isinstance(token_id, bool) or not isinstance(token_id, Integral) or not 0 <= int(token_id) < vocab_size:
                raise InputError(f"token id {token_id!r} is not in the vocabulary of {vocab_size}")
        room = self.max_len if request.params.max_tokens == 0 else self.max_len - 1
        if num_prompt > room:
            raise InputError(f"the prompt has {num_prompt} tokens; at most {room} fit into a length of {self.max_len}")
        if request.params.max_tokens == 0 and num_prompt < 2:
            raise InputError("scoring needs at least two tokens: the first has no log-probability")
        for token_id, _ in request.params.logit_bias:
            if token_id >= vocab_size:
                raise InputError(f"logit_bias names token {token_id}; the vocabulary has {vocab_size}")
        for token_id in request.params.stop_ids:
            if token_id >= vocab_size:
                raise InputError(f"stop_ids names token {token_id}; the vocabulary has {vocab_size}")
        if request.drafter is not None and request.drafter not in self._drafters.names:
            raise InputError(f"unknown drafter {request.drafter!r}; known: {', '.join(self._drafters.names)}")
        self._check_speculation(request)
        if request.params.deterministic and self._no_family_reason:
            raise DeterminismError(
                f"deterministic requests cannot be served here: {self._no_family_reason}; "
                "a request with deterministic=False can"
            )
        if request.params.n > self._config.max_waiting:
            raise InputError(f"n = {request.params.n} exceeds the queue's {self._config.max_waiting} places")

    def _check_speculation(self, request: Request) -> None:
        """Refuse a tree or a rule that this drafter, or a deterministic request, cannot have."""
        drafter, accept, tree = request.drafter or self._default_drafter, request.accept, request.tree
        if tree is not None and not self._drafters.has_probabilities(drafter):
            raise InputError(f"tree {tree} needs a drafter with probabilities (skip, model, auto), not {drafter!r}")
        if accept is Accept.MATCH:
            return
        if request.params.deterministic:
            raise InputError(
                f"accept {accept} lets tokens depend on the drafter, the tree and the load, so it needs "
                "deterministic=False"
            )
        if drafter == AUTO or not self._drafters.has_probabilities(drafter):
            raise InputError(f"accept {accept} needs the probabilities of drafter skip or model, not {drafter!r}")
        if accept is Accept.REJECTION and tree is not None and not tree.is_chain:
            raise InputError(f"accept rejection is for chains; tree {tree} needs accept recursive")


def _max_len(backend: Backend, config: EngineConfig) -> int:
    limits = backend.limits
    if config.num_slots > limits.num_slots:
        raise InputError(f"num_slots is {config.num_slots}, but the backend has {limits.num_slots}")
    wanted = config.max_len or min(limits.context_len, config.num_slots)
    if wanted > limits.context_len:
        raise InputError(f"max_len is {wanted}, but the model's context is {limits.context_len}")
    return wanted


def _note_stalls(plan: Plan, scores: Scores) -> None:
    """What the replays of this step cost those who had nothing to do with them: rows of final fast passes."""
    replayed = [p for p in plan.canonical if p.window]
    if not replayed or not plan.fast:
        return
    for p in plan.fast:
        p.sequence.stats.longest_stall = max(p.sequence.stats.longest_stall, scores.canonical_seconds)
    num_rows = sum(p.num_pending + p.draft_quota for p in plan.canonical)
    for p in replayed:
        share = (p.num_pending + p.draft_quota) / num_rows
        p.sequence.stats.stall_caused += scores.canonical_seconds * share
