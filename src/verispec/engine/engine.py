"""The engine: a synchronous, single-threaded, sans-IO state machine. `add`, `step`, `abort`, and nothing else.

The clock, the source of random seeds and the backend come in from outside, so a whole run can be simulated from a seed.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf

from verispec.backends.cost import FLAT_COST, CostTable
from verispec.backends.protocol import Backend
from verispec.config import EngineConfig
from verispec.engine.commit import Committer
from verispec.engine.policy import Policy
from verispec.engine.request import Request, RequestChecks
from verispec.engine.roster import Roster
from verispec.engine.scheduler import Scheduler
from verispec.engine.sequence import Sequence
from verispec.errors import InputError, QueueFullError
from verispec.kv import NoPrefixCache, PrefixCache, RadixPrefixCache, SlotPool
from verispec.sampling.rows import SampleKey
from verispec.spec.drafter import Drafter, DrafterSet
from verispec.spec.judging import judge
from verispec.spec.passes import Flight, Passes
from verispec.spec.speculation import Speculation
from verispec.spec.turn import Step
from verispec.types import (
    MAX_SEED_BITS,
    Draft,
    FinishReason,
    SamplingParams,
    SequenceStats,
    TokenEvent,
    Totals,
)

_HOST_MEMORY = 0.9  # of the running average of host seconds
# Seconds of the host beside a far device: in so long a step passes were prepared, which are not once more; unless many
# such steps follow each other.
_PREPARING, _MOST_PREPARING = 0.02, 8


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
        random_seed: Callable[[], int] = lambda: secrets.randbits(MAX_SEED_BITS),
    ) -> None:
        config = config or EngineConfig(num_slots=backend.limits.num_slots)
        shapes = tuple(m for m in sorted(family) if m <= config.row_budget) or tuple(sorted(family))[:1]
        row_budget = max(shapes, default=config.row_budget)
        stream_budget = min(row_budget, config.stream_row_budget or row_budget)
        self.max_len = _max_len(backend, config)
        self._backend = backend
        self._config = config
        self._clock = clock
        self._cost = cost
        self._random_seed = random_seed
        self._pool = SlotPool(config.num_slots)
        num_stores = backend.limits.num_stores
        self._cache: PrefixCache = (
            RadixPrefixCache(self._pool, num_stores, weights_version=backend.weights_version)
            if config.prefix_cache
            else NoPrefixCache(num_stores)
        )
        self._drafters = DrafterSet(drafters, vocab_size=backend.limits.vocab_size, max_tail=backend.limits.max_tail)
        self._default = Speculation(default_drafter or self._drafters.names[0])
        if self._default.method not in self._drafters.names:
            raise InputError(f"unknown drafter {default_drafter!r}; known: {', '.join(self._drafters.names)}")
        self.checks = RequestChecks(
            limits=backend.limits, config=config, skills=self._drafters.skills, default=self._default,
            max_len=self.max_len, no_family_reason="" if shapes else no_family_reason,
        )  # fmt: skip
        self._policy = policy = Policy(
            shapes, cost, self._drafters, row_budget=stream_budget, max_draft=config.max_draft,
            max_burst=config.max_burst, follows=backend.limits.follows, by_probability=backend.limits.by_probability,
            fits_rows=backend.limits.fits_rows, leaves_out=backend.limits.leaves_out,
        )  # fmt: skip
        max_running = min(config.max_running, stream_budget, backend.limits.num_seq_rows)
        self._roster = Roster(self._pool, self._cache, backend.bind, clock, max_running=max_running)
        self._scheduler = Scheduler(
            self._roster,
            policy,
            row_budget=row_budget,
            stream_budget=stream_budget,
            context_len=backend.limits.context_len,
            has_family=bool(shapes),
            all_canonical=bool(shapes) and set(shapes) >= {m for m in backend.shapes if m <= row_budget},
            feeds=config.depth > 1,
            follows=backend.limits.follows,
        )
        self._committer = Committer(self._roster)
        self._passes = Passes(
            backend,
            canonical_shape=policy.costs.canonical_shape,
            fast_shape=policy.costs.fast_shape,
            joins=policy.costs.joins,
            observe=cost.observe_pass,
            clock=clock,
        )
        self._flights: deque[Flight] = deque()
        self._given_up: list[Sequence] = []  # who was in the air when a step failed
        self._ended_totals = Totals()
        self._live: dict[int, list[Sequence]] = {}
        self._ended: list[TokenEvent] = []
        self._num_long = 0  # steps in a row in which passes seem to have been prepared
        self._next_request_id = 0
        self._next_sequence_id = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._live or self._ended or self._flights)

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._roster.waiting)

    @property
    def num_running(self) -> int:
        """Sequences that hold slots."""
        return len(self._roster.running)

    @property
    def num_free_slots(self) -> int:
        """Slots that no request holds; the prefix cache may use them until one needs them."""
        return self._roster.num_available

    @property
    def kv_usage(self) -> float:
        """The share of the slots that requests hold."""
        return 1 - self.num_free_slots / self._pool.num_slots

    @property
    def predicted_seconds(self) -> float:
        """How long the newest pass should take, with all its rounds."""
        pass_ = self._passes.newest
        return 0.0 if pass_ is None else self._cost.pass_seconds(pass_)

    def has_room(self, params: SamplingParams, *, num_before: int = 0) -> bool:
        """Whether the queue can take a request with these parameters now, behind `num_before` others."""
        return self.num_waiting + num_before + params.n <= self._config.max_waiting

    def validate(self, request: Request) -> None:
        """Raise InputError, naming what is wrong, if this engine can never serve the request."""
        self.checks.validate(request)

    def add(self, request: Request, *, request_id: int | None = None) -> int:
        """Queue a request; returns its id. Raises InputError for a bad one, QueueFullError when there is no room.

        Whoever gives ids gives all of them.
        """
        self.validate(request)
        if not self.has_room(request.params):
            raise QueueFullError(f"the queue is full: {self.num_waiting} of {self._config.max_waiting} places taken")
        params = request.params
        if request_id is None:
            request_id, self._next_request_id = self._next_request_id, self._next_request_id + 1
        seed = self._random_seed() if params.seed is None else params.seed
        prompt_ids = tuple(map(int, request.prompt_ids))
        limit = self.max_len if params.max_tokens is None else len(prompt_ids) + params.max_tokens
        stopping_ids, predictions = request.stopping_ids, request.predictions
        constraint = None if request.grammar is None else request.grammar.start(stopping_ids)
        samples: list[Sequence] = []
        now = self._clock()
        for i in range(params.n):  # all are made before any is queued: making one may fail
            sequence = Sequence(
                sequence_id=self._next_sequence_id + i,
                request_id=request_id,
                sample_key=SampleKey(seed, request.first_sample + i),
                params=params,
                prompt_ids=prompt_ids,
                stopping_ids=stopping_ids,
                max_len=min(self.max_len, limit),
                speculation=request.speculation or self._default,
                text_sink=request.text(),
                given_ids=tuple(map(int, request.committed_ids[i])) if request.committed_ids else (),
                is_traced=request.is_traced,
                tells_drafts=request.is_traced or not self._config.shares_history,
                is_streamed=request.is_streamed,
                batch=request.batch,
                salt=request.salt,
                prediction_ids=predictions,
                stats=SequenceStats(arrival_time=now),
                constraint=constraint,
                leader=samples[0] if samples and self._config.prefix_cache else None,
            )
            samples.append(sequence)
        for sequence in samples:
            self._roster.add(sequence)
        self._next_sequence_id += params.n
        self._live[request_id] = samples
        return request_id

    def step(self) -> list[TokenEvent]:
        """Draft, verify, accept, commit: one round, or a burst of rounds. Returns what became visible."""
        try:
            start = self._clock()
            looked = self._look()
            while len(self._flights) < self._config.depth and any(step := self._plan()):
                self._drafters.draft(step.turns)
                self._flights.append(self._passes.submit(step))
                if self._scheduler.looks.are_late:
                    looked += self._look()
            submitted = self._clock()
            step = self._landed(self._flights.popleft()) if self._flights else Step()
            waited = self._clock() - submitted
            judge(step.turns)
        except BaseException:  # a pass failed or was interrupted: what was in the air is given up, and planned again
            self._abandon()
            raise
        events = self._committer.commit(step, self._clock())
        self._drafters.observe(step.turns)
        self._note_host_seconds(start + looked, waited, step)
        return self._told(events)

    def _plan(self) -> Step:
        return self._scheduler.plan_ahead(self._flights[-1].step) if self._flights else self._scheduler.plan()

    def _look(self) -> float:
        """Ask drafters, mostly while something is in the air; returns the seconds that it took."""
        start = self._clock()
        num_asked = self._scheduler.looks.look(in_air=bool(self._flights))
        if not num_asked:
            return 0.0
        seconds = self._clock() - start
        self._policy.note_looks(seconds / num_asked)
        return seconds

    def _landed(self, flight: Flight) -> Step:
        """What was planned ahead learns where its sequences are now."""
        self._scheduler.locate(flight.step.turns)
        return flight.collect()

    def _abandon(self) -> None:
        while self._flights:
            self._flights.popleft().abandon()
        self._given_up = [s for s in self._roster.running if s.kv.num_flights]
        self._roster.void()

    def _note_host_seconds(self, start: float, waited: float, step: Step) -> None:
        """Of all steps; of those in which the host drafted, without passes, or looked whether to; and of rounds that
        the backend drafted."""
        total = self._clock() - start
        is_long = bool(self._cost.trip) and total - waited > _PREPARING
        self._num_long = self._num_long + 1 if is_long else 0
        if is_long and self._num_long <= _MOST_PREPARING:
            return
        seconds = max(0.0, total - max((r.seconds for part in step for r in part), default=0.0))
        self._scheduler.host_seconds += (1 - _HOST_MEMORY) * (seconds - self._scheduler.host_seconds)
        if not self._cost.learns:  # its seconds are not those of a clock
            return
        by_host = [t for t in step.turns if isinstance(t.draft, Draft) and len(t.draft)]
        has_looked = bool(by_host) or any(cohort.choices for cohort in step.cohorts)
        if has_looked and not any(t.choice.draft_seconds for t in by_host):
            beyond = total - waited + self._cost.trip if self._cost.trip else seconds
            self._policy.rates.host_seconds += (1 - _HOST_MEMORY) * (beyond - self._policy.rates.host_seconds)
        num_rounds = sum(len(t.rounds) for t in step.turns)
        if num_rounds:
            self._policy.rates.note_rounds((total - waited if self._cost.trip else seconds) / num_rounds, num_rounds)
            if self._cost.trip and not step.cohorts and all(turn.is_resident for turn in step.turns):
                self._policy.note_burst(step.turns)

    @property
    def totals(self) -> Totals:
        """Counters over all requests so far, live ones included."""
        totals = self._ended_totals.copy()
        for samples in list(self._live.values()):  # a copy: another thread may be stepping
            for sequence in list(samples):
                totals.add(sequence.stats, len(sequence.logprobs))
        return totals

    def abort(self, request_id: int) -> bool:
        """End a request now and free its slots. Its last events come with the next step. False if it has ended."""
        samples = list(self._live.get(request_id, ()))
        for sequence in samples:
            sequence.finish(FinishReason.ABORT)
        self._ended = self._removed(samples)
        return bool(samples)

    def fail(self, error: str) -> list[TokenEvent]:
        """End what was in the air when a step failed, with an error; returns what became visible. The others can go
        on."""
        running = list(self._roster.running)
        failed = [s for s in running if s in self._given_up] or running or list(self._roster.waiting)
        self._given_up = []
        self._roster.void()
        for sequence in failed:
            sequence.fail(error)
        return self._removed(failed)

    def _removed(self, sequences: list[Sequence]) -> list[TokenEvent]:
        """Forget sequences that have ended outside a step."""
        for sequence in sequences:
            self._roster.remove(sequence)
        return self._told(self._committer.told(sequences, self._clock()))

    def check(self) -> None:
        """Raise if the books do not balance: every slot is free or has one owner: a sequence, a lease or the cache."""
        holders = (*self._roster.running, *self._roster.departing)
        self._pool.check()
        self._cache.check(s.kv.node for s in holders)
        own = [s.slots[s.kv.num_shared :] for s in holders] + [lease.slots for lease in self._pool.leases]
        owners = Counter(slot for slots in (*own, self._cache.slots()) for slot in slots)
        if max(owners.values(), default=1) > 1 or len(owners) + self._pool.num_free != self._pool.num_slots:
            raise AssertionError("a slot has two owners, or none and is not free")
        if any(s.slots or s.kv.lease for s in self._roster.waiting):
            raise AssertionError("a waiting sequence holds slots")
        for sequence in holders:
            sequence.kv.check()

    def _told(self, events: list[TokenEvent]) -> list[TokenEvent]:
        """Forget the sequences whose last event this is; what was waiting to be told goes first."""
        for event in events:
            if event.output is not None:
                samples = self._live[event.request_id]
                sequence = next(s for s in samples if s.sample_key.sample_index == event.sample_index)
                self._drafters.forget(sequence)
                self._ended_totals.add(sequence.stats, len(sequence.logprobs))
                samples.remove(sequence)
                if not samples:
                    del self._live[event.request_id]
        if self._ended:
            events, self._ended = self._ended + events, []
        return events


def _max_len(backend: Backend, config: EngineConfig) -> int:
    limits = backend.limits
    if config.num_slots > limits.num_slots:
        raise InputError(f"num_slots is {config.num_slots}, but the backend has {limits.num_slots}")
    wanted = config.max_len or min(limits.context_len, config.num_slots)
    if wanted > limits.context_len:
        raise InputError(f"max_len is {wanted}, but the model's context is {limits.context_len}")
    return wanted
