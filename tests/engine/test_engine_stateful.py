"""The real engine on the fake backend under random requests, steps and aborts; the invariants after every rule.

Pools are tiny, so that sequences are preempted and cached prefixes evicted; prompts are made of three tokens, so that
they share prefixes; free slots are poisoned, so that reading a stale one changes the output.
"""

import itertools
import logging
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.support.adversaries import (
    DRAFTER_NAMES,
    FAMILY,
    VOCAB_SIZE,
    FinishFails,
    LetterText,
    PushFails,
    StopText,
    adversaries,
    alone,
    beyond,
    collect,
    facts,
    keep_apart,
)
from tests.support.fake_backend import FakeBackend
from tests.support.passes import RowsBuilder
from tests.support.scale import is_whole, scaled
from verispec.backends.protocol import Pass, PassKind, PassResult, TableUpdate, Wanted
from verispec.config import EngineConfig
from verispec.engine import Engine, Request
from verispec.engine.sequence import NO_DRAW
from verispec.kv import NUM_RESERVED, RadixPrefixCache
from verispec.spec.speculation import AUTO, Speculation
from verispec.types import FinishReason, SampleOutput, SamplingParams, TokenEvent, TokenLogprob

MAX_LEN = 24
NAN_TOKEN = 6
MAX_DRAFT = 12
DECODING = ("decode", AUTO)  # the drafters that may use regular decoding
MIN_RULES = 10_000  # this file's share of the 10^5 rules that the stateful tests of kv/ and engine/ execute
CI = settings(
    max_examples=scaled(320),
    stateful_step_count=45,
    deadline=None,
    phases=[Phase.generate, Phase.shrink],
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
Prefix = tuple[int, ...]


def random_request(seed: int) -> Request:
    rng = random.Random(seed)
    prompt_logprobs = rng.choice((None, None, None, 0, 2))
    max_tokens = rng.choice((1, 3, 6, 10, MAX_LEN, None) if prompt_logprobs is None else (0, 2, 8))
    params = SamplingParams(
        temperature=rng.choice((0.0, 0.7, 1.0, 1.5)),
        top_k=rng.choice((0, 0, 3)),
        top_p=rng.choice((1.0, 1.0, 0.8)),
        seed=rng.choice((0, 1, 2**64 - 1)),
        n=rng.choice((1, 1, 1, 2, 3)),
        max_tokens=max_tokens,
        min_tokens=rng.randint(0, min(4, MAX_LEN if max_tokens is None else max_tokens)),
        stop_ids=rng.choice(((), (3,), (4, 5))),
        repetition_penalty=rng.choice((1.0, 1.0, 1.3)),
        presence_penalty=rng.choice((0.0, 0.0, 0.6)),
        frequency_penalty=rng.choice((0.0, 0.0, -0.4)),
        logprobs=rng.choice((None, 0, 1, 3)),
        prompt_logprobs=prompt_logprobs,
        deterministic=rng.random() < 0.75,
    )
    prompt = tuple(rng.choices(range(3), weights=(6, 2, 1), k=rng.randint(2, 14)))
    text = rng.choices((LetterText, StopText, PushFails, FinishFails), weights=(8, 3, 1, 1))[0]
    return Request(prompt, params, eos_ids=rng.choice(((), (7,))), text=text)


MENU = tuple(random_request(seed) for seed in range(320))  # few enough that the oracle runs each of them once
NAMES = DRAFTER_NAMES + DECODING * 6  # regular decoding lives over many steps: more can go wrong


class RecordingBackend(FakeBackend):
    """Notes who drew what in which kind of pass, and that every real row writes to a leased slot of its own."""

    engine: Engine

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.drawn: set[tuple[int, int, int, PassKind]] = set()

    def run(self, pass_: Pass) -> PassResult:
        result, draw = super().run(pass_), pass_.wanted.draw
        owners = {s.kv.seq_row: s for s in self.engine._roster.running}
        rows = {owners[r].sequence_id: owners[r] for r in pass_.rows.seq_rows.tolist() if r}
        leased = {slot for lease in self.engine._pool.leases for slot in lease.slots}
        written = [s for s in pass_.rows.slots.tolist() if s >= NUM_RESERVED]
        assert len(set(written)) == len(written), "two rows write to one slot"
        assert set(written) <= leased, "a row writes to a slot that is not leased"
        if pass_.kind is PassKind.CANONICAL:
            assert len(pass_.rows) in FAMILY
            assert pass_.head_shape in (0, *FAMILY)
        else:
            canonical = [s for s in rows.values() if s.params.deterministic]
            assert all(s.speculation.method in DECODING for s in canonical), "a deterministic row in a fast pass"
        if draw is not None:
            for row, token_id in zip(draw.rows.tolist(), result.draw.token_ids.tolist(), strict=True):
                owner = owners[int(pass_.rows.seq_rows[row])]
                self.drawn.add((owner.sequence_id, int(pass_.rows.positions[row]) + 1, token_id, pass_.kind))
        return result


_canonical: dict[Prefix, int] = {}


def canonical_hash(prefix: Prefix) -> int:
    """The K/V of a prefix's last token, by one canonical pass over the prefix in a fresh backend."""
    if prefix not in _canonical:
        backend, rows, num = FakeBackend(num_slots=MAX_LEN, context_len=MAX_LEN), RowsBuilder(), len(prefix)
        slots = [NUM_RESERVED + i for i in range(num)]
        for i, token_id in enumerate(prefix):
            rows.add(token_id=token_id, position=i, slot=slots[i], seq_row=1, prefix_len=i + 1)
        padded = rows.build(num)
        update = TableUpdate(padded.seq_rows, padded.positions, padded.slots)
        backend.submit(Pass(PassKind.CANONICAL, padded, Wanted(), update, head_shape=0))
        for i, slot in enumerate(slots):
            _canonical[prefix[: i + 1]] = int(backend.kv[0, slot])
    return _canonical[prefix]


def cached_prefixes(engine: Engine) -> Iterator[tuple[Prefix, int]]:
    """Every path of the prefix cache from the root, with the slot of its last token."""
    if isinstance(engine._cache, RadixPrefixCache):
        stack = [((), root) for root in engine._cache._roots.values()]
        while stack:
            path, node = stack.pop()
            for i, slot in enumerate(node.slots):
                yield (*path, *node.token_ids[: i + 1]), slot
            stack += [((*path, *node.token_ids), child) for child in node.children.values()]


class Stream:
    """What a client has received of one sample."""

    def __init__(self, request: Request, sequence_id: int) -> None:
        self.request, self.sequence_id = request, sequence_id
        self.logprobs: tuple[TokenLogprob, ...] = ()
        self.text = ""
        self.output: SampleOutput | None = None

    def receive(self, event: TokenEvent) -> None:
        assert self.output is None, "an event after the last one"
        self.logprobs += tuple(event.logprobs)
        self.text += event.text
        self.output = event.output

    @property
    def tokens(self) -> Prefix:
        return (*self.request.prompt_ids, *(entry.token_id for entry in self.logprobs))


class EngineMachine(RuleBasedStateMachine):
    num_rules = 0
    seen: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.streams: dict[int, list[Stream]] = {}
        self.due: dict[int, int] = {}  # request id -> the step by which it must have ended
        self.expected: dict[int, Prefix] = {}
        self.committed: set[Prefix] = set()
        self.cached: set[Prefix] = set()
        self.aborted: set[tuple[int, int]] = set()
        self.num_steps = self.num_idle = 0
        self.is_broken = True  # until it has started; and when a step has raised
        self.rules_here = -1  # the invariants also run once before the first rule

    @initialize(
        num_slots=st.integers(MAX_LEN, 64),
        row_budget=st.sampled_from((4, 8, 16)),
        stream_row_budget=st.sampled_from((None, None, 1, 4, 6)),
        max_running=st.sampled_from((1, 3, 16)),
        max_draft=st.sampled_from((1, 4, MAX_DRAFT)),
        prefix_cache=st.sampled_from((True, True, False)),
        nan_token=st.sampled_from((None, None, NAN_TOKEN)),
        joined=st.booleans(),
        max_burst=st.sampled_from((1, 2, 5, 16)),
        depth=st.sampled_from((1, 1, 2)),
    )
    def start(self, num_slots: int, nan_token: int | None, joined: bool, **options: int) -> None:
        self.nan_token, self.depth = nan_token, options["depth"]
        self.backend = RecordingBackend(
            vocab_size=VOCAB_SIZE, context_len=MAX_LEN, num_slots=num_slots, max_tail=6, nan_token=nan_token
        )
        config = EngineConfig(num_slots=num_slots, max_len=MAX_LEN, **options)
        self.engine = Engine(self.backend, family=FAMILY, drafters=adversaries(self.expected), config=config)
        if not joined:
            keep_apart(self.engine)
        self.backend.engine = self.engine
        self.is_broken = False

    def oracle(self, request: Request) -> tuple[SampleOutput, ...]:
        return alone(request, max_len=MAX_LEN, nan_token=self.nan_token)

    @precondition(lambda self: len(self.engine._live) < 8)
    @rule(orders=st.lists(st.tuples(st.integers(0, len(MENU) - 1), st.sampled_from(NAMES)), min_size=1, max_size=3))
    def add(self, orders: list[tuple[int, str]]) -> None:
        for index, drafter in orders:
            request, first = MENU[index], self.engine._next_sequence_id
            request_id = self.engine.add(replace(request, speculation=Speculation(drafter)))
            self.streams[request_id] = [Stream(request, first + i) for i in range(request.params.n)]
            for i, text in enumerate(beyond(request, max_len=MAX_LEN, nan_token=self.nan_token)):
                self.expected[first + i] = text
            # Oldest first: the oldest sequence gets a row in every step and needs one less than its longest length.
            # Regular decoding may take a whole window of steps for one token.
            work = sum(
                (s.max_len - 1) * (MAX_DRAFT + 1 if s.speculation.method in DECODING else 1)
                for samples in self.engine._live.values()
                for s in samples
            )
            self.due[request_id] = self.num_steps + work + 1  # one more for the events of an abort
            self.committed |= {request.prompt_ids[:i] for i in range(1, len(request.prompt_ids) + 1)}

    @rule(count=st.sampled_from((1, 1, 2, 5)))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.one_step()

    @precondition(lambda self: self.streams)
    @rule(pick=st.integers(0, 2**16), any_age=st.booleans())
    def abort(self, pick: int, any_age: bool) -> None:
        request_ids = [*self.streams, 10**6] if any_age else list(self.engine._live) or [10**6]
        request_id = request_ids[pick % len(request_ids)]
        is_live = request_id in self.engine._live
        assert self.engine.abort(request_id) is is_live
        self.aborted |= {(request_id, i) for i, s in enumerate(self.streams.get(request_id, ())) if s.output is None}
        assert request_id not in self.engine._live

    def one_step(self) -> None:
        had_work, before = self.engine.has_work, self.computed_lens()
        # What a step commits was drawn in it, or with two flights in the air in the one before.
        self.drawn_before, self.backend.drawn = self.backend.drawn if self.depth > 1 else set(), set()
        self.is_broken = True
        events = self.engine.step()
        self.is_broken = False
        self.num_steps += 1
        after = self.computed_lens()
        has_advanced = not had_work or bool(events) or any(after[i] > before.get(i, (0, 0)) for i in after)
        self.num_idle = 0 if has_advanced else self.num_idle + 1
        assert self.num_idle < self.depth, "a step advanced nothing, and collected no flight that had become stale"
        for event in events:
            self.receive(event)
        self.backend.poison(self.engine._pool._free)
        late = [i for i in self.engine._live if self.num_steps > self.due[i]]
        assert not late, f"requests {late} take too long"

    def computed_lens(self) -> dict[int, tuple[int, int]]:
        return {s.sequence_id: (s.computed_len, s.stats.fast_passes) for s in self.engine._roster.running}

    def receive(self, event: TokenEvent) -> None:
        """Invariants 1, 3, 4 and 6, as seen by the client."""
        stream = self.streams[event.request_id][event.sample_index]
        t = len(stream.tokens)
        stream.receive(event)
        for i in range(t, len(stream.tokens)):
            drawn = (stream.sequence_id, i, stream.tokens[i], PassKind.CANONICAL)
            assert not stream.request.params.deterministic or drawn in self.backend.drawn | self.drawn_before
            self.committed.add(stream.tokens[: i + 1])
        output, params = event.output, stream.request.params
        if output is None:
            return
        assert (tuple(output.logprobs), output.text) == (stream.logprobs, stream.text)
        self.note(output)
        if not params.deterministic:
            return
        truth = self.oracle(stream.request)[event.sample_index]
        if (event.request_id, event.sample_index) in self.aborted:
            assert repr(output.logprobs) == repr(truth.logprobs[: len(output.logprobs)])
        else:
            assert facts(output) == facts(truth)

    def note(self, output: SampleOutput) -> None:
        stats = output.stats
        self.seen[output.finish_reason] += 1
        self.seen[f"error: {output.error}"] += 1
        self.seen["preemptions"] += stats.preemptions
        self.seen["cached tokens"] += stats.cached_tokens
        self.seen["accepted"] += stats.accepted
        self.seen["rejected"] += stats.drafted - stats.accepted
        self.seen["fast passes"] += stats.fast_passes
        self.seen["replays"] += stats.replays
        self.seen["mismatches"] += stats.mismatches

    @invariant()
    def invariant_5_the_books_balance(self) -> None:
        self.rules_here += 1
        self.engine.check()
        self.backend.poison(self.engine._pool._free)
        running, waiting = (
            [s.sequence_id for s in group] for group in (self.engine._roster.running, self.engine._roster.waiting)
        )
        assert running + waiting == sorted(running + waiting), "first come, first served"

    @invariant()
    def invariant_2_only_committed_canonical_kv_is_shared(self) -> None:
        kv, cached = self.backend.kv[0], set()
        for prefix, slot in cached_prefixes(self.engine):
            assert prefix in self.committed, "the prefix cache holds what nobody committed"
            assert int(kv[slot]) == canonical_hash(prefix), "the prefix cache holds K/V that is not canonical"
            cached.add(prefix)
        self.seen["evictions"] += len(self.cached - cached)
        self.cached = cached
        for s in self.engine._roster.running:
            for i in range(s.kv.canonical_len):
                assert int(kv[s.slots[i]]) == canonical_hash(tuple(s.token_ids[: i + 1]))

    def teardown(self) -> None:
        EngineMachine.num_rules += self.rules_here
        if self.is_broken:
            return
        while self.engine.has_work:
            self.one_step()
        assert all(stream.output is not None for samples in self.streams.values() for stream in samples)
        pool = self.engine._pool
        assert self.engine.num_free_slots == pool.num_slots, "slots are held after the last request"
        self.engine._cache.evict(pool.num_slots)
        assert pool.num_free == pool.num_slots
        assert not self.engine._drafters._drafters["suffix"]._own


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Broken drafters and texts are logged with tracebacks, thousands of times here."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_the_invariants_hold_after_every_rule() -> None:
    run_state_machine_as_test(EngineMachine, settings=CI)
    seen = EngineMachine.seen
    if not is_whole():
        return
    assert EngineMachine.num_rules >= MIN_RULES
    happened = [
        *FinishReason, "preemptions", "evictions", "cached tokens", "accepted", "rejected", "fast passes", "replays",
        "mismatches",
    ]  # fmt: skip
    errors = [f"error: {NO_DRAW}", "error: UnicodeError: no such letter", "error: UnicodeError: no end"]
    assert {name: seen[name] for name in happened + errors if seen[name] < 25} == {}


def crowd_and_alone(*, deterministic: bool, sabotage: str = "") -> tuple[list[SampleOutput], list[SampleOutput]]:
    """The outputs of requests run together with drafts, and of each by itself without."""
    backend = FakeBackend(vocab_size=VOCAB_SIZE, context_len=MAX_LEN, sabotage=sabotage)
    config = EngineConfig(max_len=MAX_LEN, num_slots=backend.limits.num_slots)
    engine = Engine(backend, family=FAMILY, drafters=adversaries({}), config=config)
    params = SamplingParams(max_tokens=8, seed=3, temperature=1.0, logprobs=2, deterministic=deterministic)
    requests = [Request((0, 1, i), params, speculation=Speculation("random tree")) for i in range(5)]
    for request in requests:
        engine.add(request)
    together = [output for _, output in sorted(collect(engine).items())]
    return together, [alone(request, max_len=MAX_LEN, sabotage=sabotage)[0] for request in requests]


def test_invariant_4_a_crowd_changes_no_bit() -> None:
    together, by_themselves = crowd_and_alone(deterministic=True)
    assert list(map(facts, together)) == list(map(facts, by_themselves))


def test_control_rows_that_depend_on_their_index_are_noticed() -> None:
    together, by_themselves = crowd_and_alone(deterministic=True, sabotage="row_index")
    assert list(map(facts, together)) != list(map(facts, by_themselves))


def test_control_fast_passes_alone_give_other_log_probabilities_in_a_crowd() -> None:
    together, by_themselves = crowd_and_alone(deterministic=False)
    assert [o.stats.passes for o in together] == [1] * 5, "only the prompt ran in a canonical pass"
    same = [
        (x.logprob, y.logprob)
        for a, b in zip(together, by_themselves, strict=True)
        for x, y in itertools.takewhile(
            lambda xy: xy[0].token_id == xy[1].token_id, zip(a.logprobs, b.logprobs, strict=False)
        )
    ]
    assert len(same) > 5, "texts begin alike"
    assert any(x != y for x, y in same), "but their log-probabilities do not"
