"""Bursts of rounds that draft: draft, verify, judge and advance, several times without the host.

Whatever the number of rounds, streams are the oracle's, K/V is canonical, and the counters are those of single rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest

from tests.engine.test_bursts import CHEAP, PLAIN, Bursts, ends, policy
from tests.spec.test_draft_store import canonical_drafts
from tests.support.adversaries import collect, facts
from tests.support.decoding import PROMPT, Watched, letters, oracle
from tests.support.fake_backend import FakeBackend
from tests.support.faulty_backends import WrappedBackend
from tests.support.sabotages import Confirming, Rebound
from tests.support.skipping import cheap_setup
from tests.support.world import Second, World, bits, make_requests, native_world, numpy_world, run
from verispec.backends import rounds
from verispec.backends.cost import CostTable
from verispec.backends.protocol import FROM_STATE, Pass, PassKind, PassResult, ReadyTicket, Ticket
from verispec.backends.tree_rounds import grow
from verispec.config import EngineConfig
from verispec.engine import Engine, Request
from verispec.engine.commit import Committer
from verispec.engine.policy import RoundLoad
from verispec.engine.sequence import Sequence
from verispec.spec.registry import make_drafters
from verispec.spec.speculation import Speculation
from verispec.spec.tree import TreeShape
from verispec.spec.turn import Turn
from verispec.types import Accept, FinishReason, SamplingParams, SequenceStats, TokenEvent

DRAFTERS = ("skip", "model", "lookup")
DRAFT_LEN = 3
COUNTED = ("passes", "fast_passes", "draft_passes", "drafted", "accepted", "chosen")


def bursts(num_rounds: int, **options: object) -> Bursts:
    return Bursts(num_rounds, draft_len=DRAFT_LEN, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("tree", ["branch:2", "beam:2,1", "branch:2,2", "beam:2,3"])
@pytest.mark.parametrize("drafter", ["skip", "model"])
def test_trees_that_the_backend_drafts_change_nothing(drafter: str, tree: str) -> None:
    """Trees of one level, too: their only pass has no row but the last token's."""
    shown = {}
    for trees in (False, True):
        backend = FakeBackend(vocab_size=16, num_stores=2)
        backend.limits = replace(backend.limits, trees=trees)
        backend.markov[1] = backend.markov[0]
        engine = Engine(
            backend,
            family=(1, 2, 4, 8, 16, 32, 64),
            drafters=make_drafters(cheap_setup(backend, DRAFT_LEN)),
            cost=CHEAP,
            config=EngineConfig(num_slots=256, max_len=100),
        )
        for i in range(3):
            engine.add(Request((1, 2, i), PLAIN, Speculation(drafter, TreeShape.parse(tree))))
        outputs = collect(engine)
        assert sum(o.stats.accepted for o in outputs.values()) > 0
        shown[trees] = [facts(outputs[key]) for key in sorted(outputs)]
    assert shown[True] == shown[False]


class AtTheDoor(FakeBackend):
    """Counts the passes of trees that the host grows; the second model is the first one's likeness."""

    def __init__(self, *, trees: bool, context_len: int) -> None:
        super().__init__(vocab_size=16, num_stores=2, context_len=context_len)
        self.limits = replace(self.limits, trees=trees)
        self.markov[1] = 0.9 * self.markov[0] + 0.1 * self.markov[1]
        self.num_grown = 0

    def submit(self, pass_: Pass) -> ReadyTicket:
        self.num_grown += pass_.wanted.noisy_top_k is not None
        return super().submit(pass_)


class Ended(NamedTuple):
    """What came of requests, round by round; how many passes the host drafted in; and in how many steps."""

    digests: list[str]
    counted: list[list[object]]
    drafted: list[list[tuple[int, ...]]]
    num_grown: int
    num_steps: int


def ended(
    requests: SequenceOf[Request], *, trees: bool = True, context_len: int = 64, **config: int
) -> Ended:  # fmt: skip
    """In canonical draft passes, whose bits depend on nothing but their rows."""
    backend = AtTheDoor(trees=trees, context_len=context_len)
    engine = Engine(
        backend, family=(1, 2, 4, 8, 16, 32, 64), drafters=canonical_drafts(backend, CHEAP), cost=CHEAP,
        config=EngineConfig(**{"num_slots": 256, "max_len": 40, "prefix_cache": False, **config}),
    )  # fmt: skip
    ids, events, num_steps = [engine.add(request) for request in requests], list[TokenEvent](), 0
    while engine.has_work:
        events += engine.step()
        num_steps += 1
        engine.check()
        backend.poison(engine._pool._free)
    outputs = {event.request_id: event.output for event in events if event.output}
    drafted = [[(e.num_accepted, *e.rejected_ids) for e in events if e.request_id == i and e.logprobs] for i in ids]
    counted = [[getattr(outputs[i].stats, name) for name in COUNTED] for i in ids]
    return Ended([outputs[i].digest for i in ids], counted, drafted, backend.num_grown, num_steps)


ENDING = [
    Request((1, 2, 3), SamplingParams(max_tokens=n, seed=n, temperature=(0.0, 0.7, 1.3)[n % 3], stop_ids=stop_ids))
    for n in (1, 2, 3, 4, 5, 7, 10, 30)
    for stop_ids in ((), (7, 9, 11))
]


@pytest.mark.parametrize("tree", ["branch:3,2,1", "branch:2,2", "branch:4", "beam:3,4", "beam:2,1"])
@pytest.mark.parametrize("drafter", ["skip", "model"])
def test_trees_that_reach_behind_the_end_are_drafted_by_the_backend(drafter: str, tree: str) -> None:
    """What is drafted, accepted and counted is what the host would grow, in bursts and round by round, alone and in a
    crowd; and the answers are those of drafter `none`. Beside the first draft of `model`, which reads the prompt."""
    shape = TreeShape.parse(tree)
    most_grown = shape.depth if drafter == "model" else 0
    requests = [replace(r, speculation=Speculation(drafter, shape)) for r in ENDING]
    plain = ended([replace(r, speculation=Speculation("none")) for r in requests]).digests
    num_accepted = 0
    for request, digest in zip(requests, plain, strict=True):
        host = ended([request], trees=False, max_burst=1)
        for max_burst, depth in ((1, 1), (1, 2), (2, 2), (3, 1), (64, 2), (64, 1)):
            found = ended([request], max_burst=max_burst, depth=depth)
            assert found[:3] == host[:3]
            assert found.num_grown <= most_grown
        assert found.digests == [digest]
        assert found.num_steps <= 5, "an answer is a few bursts, each as long as is expected"
        num_accepted += sum(first for (first, *_) in host.drafted[0])
    assert num_accepted > 10, "nothing was accepted: no control"
    for depth in (1, 2):
        together = ended(requests, max_burst=3, depth=depth)
        assert together.digests == plain
        assert together.num_grown <= most_grown * len(requests)


@pytest.mark.parametrize("max_draft", [1, 2])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("tree", ["branch:2,1,1", "branch:3,2,1", "beam:3,4", "beam:2,3", "chain:5"])
def test_trees_of_fewer_levels_than_they_could_have_lease_all_of_their_places(
    tree: str, depth: int, max_draft: int
) -> None:
    """A level of several nodes, of which one can be committed: rounds near the end need more slots than tokens."""
    requests = [Request((1, 2, 3), SamplingParams(max_tokens=n, seed=n, temperature=0.7)) for n in (3, 4, 5, 7, 10, 30)]
    plain = ended([replace(r, speculation=Speculation("none")) for r in requests]).digests
    for drafter in ("skip", "model"):
        speculation = Speculation(drafter, TreeShape.parse(tree))
        found = ended(
            [replace(r, speculation=speculation) for r in requests], max_burst=8, depth=depth, max_draft=max_draft
        )
        assert found.digests == plain


@pytest.mark.parametrize("depth", [1, 2])
def test_rounds_of_sequences_that_reach_the_end_of_the_table(depth: int) -> None:
    """Some are at the end of their rows while others have far to go: no entry of a row lies behind its end."""
    requests = [
        Request((1,) * n, SamplingParams(max_tokens=24 - n, seed=n, temperature=0.7), Speculation("none"))
        for n in (2, 5, 8, 20)
    ]
    alone = [ended([request], context_len=24, max_len=24, max_burst=64).digests[0] for request in requests]
    assert ended(requests, context_len=24, max_len=24, max_burst=64, depth=depth).digests == alone


def test_control_levels_that_cannot_be_committed_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def unbounded(resident, part, fed, live, depths, drafts, run):  # type: ignore[no-untyped-def]
        grow(resident, part, fed, live, depths + 9, drafts, run)

    monkeypatch.setattr(rounds, "grow", unbounded)
    with pytest.raises((AssertionError, IndexError)):
        test_trees_that_reach_behind_the_end_are_drafted_by_the_backend("skip", "branch:3,2,1")


@pytest.mark.parametrize("tree", ["branch:3,2,1", "beam:3,4"])
@pytest.mark.parametrize("max_burst", [1, 3, 16])
def test_trees_end_with_the_table(tree: str, max_burst: int) -> None:
    """Where its row has no room for all places the host grows them."""
    params = SamplingParams(max_tokens=None, seed=5, temperature=0.7)
    for context_len in (40, 44, 56):
        request = Request((1, 2, 3), params, Speculation("skip", TreeShape.parse(tree)))
        found = ended([request], context_len=context_len, max_burst=max_burst)
        assert found[:3] == ended([request], trees=False, context_len=context_len, max_burst=1)[:3]
        assert found.digests == ended([replace(request, speculation=Speculation("none"))]).digests
        assert (found.num_grown > 0) == (context_len < 56)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("num_rounds", [1, 2, 16])
def test_a_burst_is_its_single_rounds(num_rounds: int, drafter: str, depth: int) -> None:
    """Stops, stop strings, limits, least lengths, penalties, samples; plain sequences and windows beside them."""
    made = bursts(num_rounds, max_running=4, depth=depth)
    for i, request in enumerate(ends(drafter)):
        made.watched.add(request)
        if i % 6 == 0:
            made.watched.add(replace(request, speculation=Speculation(("none", "decode")[i // 6 % 2])))
    outputs = made.watched.finish()
    assert {o.finish_reason for o in outputs.values()} == {FinishReason.LENGTH, FinishReason.STOP}
    totals = made.watched.totals
    assert 0 < totals.accepted < totals.drafted
    assert (max(made.late.rounds) > 1) == (num_rounds > 1)
    assert max(made.late.rounds) <= num_rounds


def counters(request: Request, num_rounds: int, *, agreeing: bool = True) -> tuple[list[SequenceStats], int]:
    """Of a request that runs alone, and how many submits it took."""
    made = bursts(num_rounds, agreeing=agreeing, family=(16, 64))
    made.watched.add(request)
    made.watched.finish()
    streams = made.watched.streams[0]
    return [s.output.stats for s in streams if s.output], len(made.late.rounds)


def test_counters_are_those_of_single_rounds() -> None:
    """Also of rounds that a stop string cut: what was drafted behind it is not counted. Chains of a given length: where
    others end moves with every round."""
    for request in ends("model"):
        request = replace(request, speculation=Speculation("model", TreeShape.chain(DRAFT_LEN)))
        single, num_single = counters(request, 1)
        several, num_several = counters(request, 5)
        for a, b in zip(single, several, strict=True):
            assert [getattr(a, name) for name in COUNTED] == [getattr(b, name) for name in COUNTED]
        assert num_several <= num_single
    assert num_several < num_single
    assert several[0].drafted > several[0].accepted > 0


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_round_of_a_stream_is_an_event(drafter: str) -> None:
    """So that accepted and rejected tokens can be told apart: those accepted come first, then one more."""
    made = bursts(16)
    made.watched.ask(params=replace(PLAIN, max_tokens=40, temperature=0.0), speculation=Speculation(drafter))
    events = []
    while made.watched.engine.has_work:
        events += [e for e in made.watched.step() if e.logprobs]
    assert len(events) > len(made.late.rounds)
    for event in events[:-1]:
        assert len(event.logprobs) == event.num_accepted + 1
        assert event.num_accepted + len(event.rejected_ids) <= DRAFT_LEN
    assert sum(e.num_accepted for e in events) == made.watched.totals.accepted > 0
    drafted = made.watched.totals.accepted + sum(len(e.rejected_ids) for e in events)
    assert drafted == made.watched.totals.drafted


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_aborts_and_preemption_at_borders(drafter: str, depth: int) -> None:
    """Slots for two sequences of four, and every third request is aborted at a border of its own."""
    made = bursts(3, num_slots=50, row_budget=8, max_running=4, prefix_cache=False, depth=depth)
    watched = made.watched
    for i, request in enumerate([*ends(drafter), *ends(drafter)]):
        request_id = watched.add(request)
        if i % 3 == 2:
            for _ in range(i % 4):
                watched.step()
            watched.abort(request_id - 1)
    watched.finish()
    assert watched.totals.preemptions > 3
    assert max(made.late.rounds) > 1


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_burst_that_fails_is_run_again(drafter: str, depth: int) -> None:
    made = bursts(4, failing=lambda number: number % 3 == 2, depth=depth)
    for request in ends(drafter):
        made.watched.add(request)
    failures = 0
    while made.watched.engine.has_work:
        try:
            made.watched.step()
        except RuntimeError:
            failures += 1
    made.watched.finish()
    assert failures > 3


# Two flights in the air.

LONG = replace(PLAIN, max_tokens=70)


def ahead(num_rounds: int, **options: object) -> Bursts:
    return bursts(num_rounds, **{"depth": 2, "num_slots": 600, **options})


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("num_rounds", [1, 3])
def test_drafted_rounds_are_planned_ahead(num_rounds: int, drafter: str) -> None:
    """Hardly ever is the air empty; slots are leased for two flights, however many there were before; counters are
    those of one flight at a time, and streams the oracle's."""
    counted = {}
    for depth in (1, 2):
        made = ahead(num_rounds, depth=depth)
        made.watched.ask(params=LONG, speculation=Speculation(drafter))
        num_empty = num_steps = 0
        while made.watched.engine.has_work:
            made.watched.step()
            num_steps += 1
            num_empty += not made.late.num_in_air
            num_leased = [len(lease.slots) for lease in made.watched.engine._pool.leases]
            assert max(num_leased, default=0) <= 2 * num_rounds * (1 + DRAFT_LEN)
        stats = made.watched.finish()[0].stats
        counted[depth] = [getattr(stats, name) for name in COUNTED]
        assert made.late.most_in_air == depth
    assert counted[1] == counted[2]
    assert num_empty < 0.5 * num_steps


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("num_rounds", [1, 3])
@pytest.mark.parametrize("num_steps", range(3))
def test_an_abort_with_two_drafted_flights_in_the_air(num_rounds: int, num_steps: int, drafter: str) -> None:
    """Its slots and its row wait for both; meanwhile nobody gets them, and the others go on as if nothing were."""
    made = ahead(num_rounds, max_running=3)
    watched = made.watched
    aborted, *_ = [watched.ask((i, 1), LONG, speculation=Speculation(drafter)) for i in range(3)]
    made.fill_the_air()
    for _ in range(num_steps):
        watched.step()
    assert made.late.num_in_air == 1
    watched.abort(aborted)
    watched.check()
    later = watched.ask((5, 5, 5), PLAIN, speculation=Speculation(drafter))
    outputs = watched.finish()
    assert outputs[aborted].finish_reason is FinishReason.ABORT
    assert outputs[later].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafted_flights_are_planned_ahead_while_slots_are_free(drafter: str) -> None:
    made = bursts(3, depth=2, num_slots=100, row_budget=16, max_running=4)
    for i in range(12):
        made.watched.ask((i % 8, 1), replace(LONG, max_tokens=40, seed=i), speculation=Speculation(drafter))
    made.watched.finish()
    assert made.watched.totals.preemptions > 0
    assert made.late.most_in_air == 2


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_what_ends_with_two_drafted_flights_in_the_air_is_published_as_it_was_committed(drafter: str) -> None:
    """A stop string ends a sequence whose next rounds are in the air. `Watched` looks at every cached slot."""
    made = ahead(2)
    watched = made.watched
    other = watched.ask((6, 6), LONG, speculation=Speculation(drafter))
    long = [replace(r, params=LONG) for r in ends(drafter) if r.text().can_stop and r.params == PLAIN]
    stopped = [watched.add(request) for request in long]
    was_in_air = False
    while any(watched.streams[i][0].output is None for i in stopped):
        ended = {event.request_id for event in watched.step() if event.output is not None}
        was_in_air |= bool(ended & {*stopped}) and made.late.num_in_air > 0
    assert was_in_air
    assert watched.finish()[other].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("num_rounds", [1, 3])
def test_a_drafted_flight_that_fails_takes_the_one_behind_it_down_and_nothing_else(
    num_rounds: int, drafter: str
) -> None:
    """Each pass fails in turn, after it has written its K/V and moved the backend's state on."""
    for number in range(1, 14):
        made = ahead(num_rounds, failing=number.__eq__, deep=False)
        watched = made.watched
        for i in range(3):
            watched.ask((i, 1), replace(LONG, max_tokens=40 + i), speculation=Speculation(drafter))
        num_failed = 0
        while watched.engine.has_work:
            try:
                watched.step()
            except RuntimeError:
                num_failed += 1
                watched.engine.check()
        watched.finish()
        assert num_failed <= 1


class LosesItsPlace(WrappedBackend):
    """Goes on from a token that its sequences did not draw, or from one position too early."""

    def __init__(self, inner: object, array: str) -> None:
        super().__init__(inner)
        self.array = array

    def submit(self, pass_: Pass) -> Ticket:
        rows = pass_.rows
        if pass_.burst is not None and pass_.burst.drafts:
            at = rows.seq_rows[rows.token_ids == FROM_STATE]
            values = getattr(self.inner.resident, self.array)
            values[at] = np.where(values[at] > 0, values[at] - 1, values[at])
        return super().submit(pass_)


@pytest.mark.parametrize("array", ["next_tokens", "lengths"])
def test_control_rounds_that_go_on_from_elsewhere_are_noticed(array: str) -> None:
    wrap = partial(LosesItsPlace, array=array)
    watched = Watched(4, draft_len=DRAFT_LEN, cost=CHEAP, max_burst=3, depth=2, num_slots=600, wrap=wrap)
    watched.ask(params=LONG, speculation=Speculation("model"))
    with pytest.raises(AssertionError):
        watched.finish()


def test_control_a_lease_that_ends_with_the_first_of_two_flights_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    commit_turn = Committer._commit_turn

    def commits_all(self: Committer, turn: Turn, sequence: Sequence) -> None:
        commit_turn(self, turn, sequence)
        if sequence.is_running:
            self._roster.trim(sequence, 0)

    monkeypatch.setattr(Committer, "_commit_turn", commits_all)
    made = ahead(2, max_running=3)
    for i in range(3):
        made.watched.ask((i, 1), LONG, speculation=Speculation("model"))
    with pytest.raises((AssertionError, ValueError)):
        made.watched.finish()


# Real models.


@pytest.fixture(scope="module", params=["numpy", "native"])
def world(request: pytest.FixtureRequest) -> World:
    world = {"numpy": numpy_world, "native": native_world}[request.param]("llama", Second.OTHER)
    world.backend.limits = replace(world.backend.limits, looks_up=True)
    return world


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_bursts_of_real_models_are_their_single_rounds(world: World, drafter: str) -> None:
    """Not a bit of tokens and log-probabilities differs, streamed or not, with aborts in between."""
    requests = [replace(r, is_streamed=i % 2 > 0) for i, r in enumerate(make_requests(7, drafter=drafter))]
    plain = [replace(r, speculation=Speculation("none")) for r in requests]
    expected = [bits(outputs) for outputs in run(world.engine(max_burst=1), plain)]
    victim = Request([1, 2, 3], SamplingParams(max_tokens=60), Speculation(drafter))
    for num_rounds, depth in ((3, 1), (2, 2), (16, 2)):
        drafters = make_drafters(cheap_setup(world.backend, 4))
        engine = world.engine(drafters, cost=CHEAP, max_burst=num_rounds, depth=depth)
        found = run(engine, requests, abort_every=7, victim=victim)
        assert [bits(outputs) for outputs in found] == expected
        assert engine.totals.accepted > 0


def test_what_native_drafts_in_a_burst_is_what_it_drafts_round_by_round() -> None:
    """Its passes give the same bits in any shape, so drafts are equal too, whoever runs beside."""
    requests = [replace(r, is_streamed=False) for r in make_requests(7, drafter="model")]
    counts = []
    for num_rounds in (1, 4, 16):
        world = native_world("llama", Second.OTHER)
        engine = world.engine(make_drafters(cheap_setup(world.backend, 4)), cost=CHEAP, max_burst=num_rounds)
        stats = [o.stats for outs in run(engine, requests) for o in outs]
        counts.append([[getattr(s, name) for name in ("draft_passes", "drafted", "accepted")] for s in stats])
    assert counts[0] == counts[1] == counts[2]


# Where bursts end.


def test_where_slots_are_short_there_are_single_rounds_before_anybody_is_preempted() -> None:
    """64 slots, two sequences of up to 22: nobody has to go for the sake of a burst."""
    made = bursts(16, num_slots=64, max_len=22)
    for i in range(2):
        made.watched.ask((i,), replace(PLAIN, max_tokens=21), speculation=Speculation("model"))
    made.watched.finish()
    assert made.watched.totals.preemptions == 0
    made = bursts(16, num_slots=8, max_len=8)
    made.watched.ask((1,), replace(PLAIN, max_tokens=7), speculation=Speculation("model"))
    made.watched.finish()
    assert made.watched.totals.drafted > 0


NEEDS: dict[str, Callable[[Request], Request]] = {
    "alternatives": lambda r: replace(r, params=replace(r.params, logprobs=2)),
    "traces": lambda r: replace(r, is_traced=True),
    "a tree": lambda r: replace(r, speculation=replace(r.speculation, tree=TreeShape.parse("branch:2,1"))),
    "probabilities": lambda r: replace(
        r,
        params=replace(r.params, deterministic=False),
        speculation=replace(r.speculation, accept=Accept.REJECTION),
    ),
}


@pytest.mark.parametrize("drafter", ["skip", "model"])
@pytest.mark.parametrize("need", list(NEEDS))
def test_who_needs_the_host_has_single_rounds(need: str, drafter: str) -> None:
    made = bursts(16)
    request = NEEDS[need](Request(PROMPT, PLAIN, Speculation(drafter)))
    made.watched.add(request)
    made.watched.finish()
    assert set(made.late.rounds) == {1}
    assert made.watched.totals.drafted > 0


@pytest.mark.parametrize(("draft_seconds", "expected"), [(0.0, 16), (0.001, 12), (0.003, 6), (0.1, 1)])
def test_a_stream_waits_for_as_many_rounds_as_fit_into_its_wait(draft_seconds: float, expected: int) -> None:
    """A verification takes 1 ms, and a stream waits for 25 ms; drafting counts."""
    cost = CostTable((1, 64), (0.001, 0.001), (0.0, 0.0))
    load = RoundLoad(4, 0, context_len=10, room=40, num_free=40, is_streamed=True, num_nodes=12)
    assert policy(cost).num_rounds(load._replace(draft_seconds=draft_seconds), 0.0) == expected
    assert policy(cost).num_rounds(load._replace(draft_seconds=draft_seconds, is_streamed=False), 0.0) == 16


# Mutations: each is caught by the same check.


def check(**wrappers: Callable[[object], object]) -> None:
    """Streams are the oracle's, and no round is run behind the end."""
    tokens = oracle(Request(PROMPT, PLAIN))[0].token_ids
    for drafter in DRAFTERS:
        for params in (PLAIN, replace(PLAIN, stop_ids=(tokens[7],)), replace(PLAIN, max_tokens=9, seed=3)):
            options = {"draft_len": DRAFT_LEN, "cost": CHEAP, "max_burst": 5, "prefix_cache": False, **wrappers}
            watched = Watched(4, **options)  # type: ignore[arg-type]
            watched.ask(params=params, speculation=Speculation(drafter), text=letters())
            stats = watched.finish(100)[0].stats
            verified = [p for p in watched.passes if p.kind is PassKind.CANONICAL]
            assert len(verified) == stats.passes, "rounds were run behind the end"
            assert stats.accepted <= stats.drafted


class Miscounted(WrappedBackend):
    """Rounds say that one token more was accepted, or one less."""

    def __init__(self, inner: object, by: int) -> None:
        super().__init__(inner)
        self.by = by

    def submit(self, pass_: Pass) -> Ticket:
        result: PassResult = self.inner.submit(pass_).result()
        found = result.burst
        if found is not None and found.drafts.size:
            drafted = (found.drafts >= 0).sum(axis=-1)
            accepted = np.clip(found.accepted + self.by, 0, drafted).astype(np.int32)
            found = found._replace(accepted=np.where(found.accepted < 0, -1, accepted).astype(np.int32))
        return ReadyTicket(replace(result, burst=found))


class FeedsBackWhatWasRejected(WrappedBackend):
    """The further rounds of a burst go on from the token that was drafted, where the target drew another."""

    def submit(self, pass_: Pass) -> Ticket:
        return self.inner.submit(pass_) if pass_.burst is None else super().submit(pass_)

    def run(self, pass_: Pass) -> PassResult:
        if pass_.kind is not PassKind.CANONICAL:
            return self.inner.run(pass_)
        return Confirming(self.inner, "first wrong").run(pass_)


def test_the_check_passes() -> None:
    check()


@pytest.mark.parametrize(
    ("wrap", "says"),
    [
        (partial(Rebound, stop_ids=()), "behind the end"),
        (partial(Miscounted, by=1), "oracle|canonical"),
        (partial(Miscounted, by=-1), "oracle|canonical|K/V"),
        (FeedsBackWhatWasRejected, "oracle"),
    ],
    ids=["runs on behind a stop", "one too many", "one too few", "feeds back a rejected token"],
)
def test_every_mutation_is_caught(wrap: Callable[[object], object], says: str) -> None:
    with pytest.raises((AssertionError, ValueError, IndexError), match=says):
        check(wrap=wrap)


def test_bursts_are_as_long_as_the_answer_is_expected_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds behind the end of an answer are in vain: where drafts are good, an answer needs few."""

    def asked_and_used(num_tokens: int = 64) -> tuple[int, int]:
        backend, asked = FakeBackend(vocab_size=16, num_stores=2), list[int]()
        backend.markov[1] = backend.markov[0]
        submit = backend.submit
        monkeypatch.setattr(
            backend, "submit", lambda p: (asked.append(1 + p.burst.num_rounds if p.burst else 1), submit(p))[1]
        )
        drafters = make_drafters(cheap_setup(backend, DRAFT_LEN))
        sizes = EngineConfig(num_slots=256, max_len=100, max_burst=16)
        engine = Engine(backend, family=(1, 2, 4, 8, 16, 32, 64), drafters=drafters, cost=CHEAP, config=sizes)
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=3, temperature=1.0)
        engine.add(Request((1, 2, 3), params, Speculation("model", TreeShape.parse("chain:3")), is_streamed=False))
        (output,) = collect(engine).values()
        assert output.stats.accepted > 0.6 * output.stats.drafted
        return sum(asked), output.stats.passes

    asked, used = asked_and_used()
    assert asked <= 1.2 * used
    # The control: a token a round.
    monkeypatch.setattr("verispec.engine.scheduler.rounds_for", lambda num_tokens, choice: num_tokens)
    monkeypatch.setattr("verispec.engine.ahead.rounds_for", lambda num_tokens, choice: 16)
    assert asked_and_used()[0] > 1.3 * used
