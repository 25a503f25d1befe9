"""Bursts and flights: rounds that a backend runs by itself, and steps that are planned before the last has landed.

A burst of n rounds gives the bits of n single rounds, which are the oracle's, wherever it begins and ends. What is in
the air runs as late as it may here, over slots that are poisoned as soon as they are free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from tests.support.adversaries import VOCAB_SIZE, collect, facts
from tests.support.decoding import PROMPT, Watched, letters, oracle
from tests.support.fake_backend import FakeBackend
from tests.support.faulty_backends import WrappedBackend
from tests.support.late_backend import LateBackend
from tests.support.scale import thinned
from tests.support.world import World, bits, make_requests, native_world, numpy_world, run
from verispec.backends.cost import CostTable
from verispec.backends.protocol import Backend, Pass, PassKind, PassResult, ReadyTicket, Ticket
from verispec.config import EngineConfig
from verispec.engine import Engine, Request
from verispec.engine.policy import Policy, RoundLoad
from verispec.sampling.rows import Sampler
from verispec.spec.drafter import DrafterSet
from verispec.spec.none import NoDrafter
from verispec.spec.speculation import Speculation
from verispec.spec.suffix import SuffixDrafter
from verispec.types import FinishReason, SampleOutput, SamplingParams

ROUNDS = (1, 2, 3, 5, 16)
# Passes are so cheap that a stream may wait for any burst.
CHEAP = CostTable((1, 64), (1e-6, 1e-6), (0.0, 0.0))
PLAIN = SamplingParams(max_tokens=20, temperature=1.0, seed=5)


class Bursts:
    """An engine under watch on a late backend."""

    def __init__(self, num_rounds: int, *, depth: int = 1, failing: Callable[[int], bool] | None = None, **options):
        self.late: LateBackend

        def wrap(backend: Backend) -> Backend:
            self.late = LateBackend(backend, failing=failing or (lambda number: False))
            return self.late

        options = {"max_burst": num_rounds, "depth": depth, "cost": CHEAP, **options}
        self.watched = Watched(16, wrap=wrap, **options)

    def fill_the_air(self) -> None:
        """Step until two flights are in the air after a step."""
        for _ in range(50):
            self.watched.step()
            if self.late.num_in_air:
                return
        raise AssertionError("nothing stays in the air")


def ends(drafter: str) -> Iterator[Request]:
    """Requests that end in every way, at many places, and that sample in every way."""
    long = Request(PROMPT, PLAIN, Speculation(drafter), text=letters())
    tokens = oracle(long)[0].token_ids
    for i in (1, 4, 9):
        pair = "".join(chr(ord("a") + t) for t in tokens[i : i + 2])
        yield replace(long, params=replace(PLAIN, max_tokens=i + 1))
        yield replace(long, params=replace(PLAIN, stop_ids=(tokens[i],)))
        yield replace(long, text=letters(pair))
        yield replace(long, eos_ids=(tokens[i],), params=replace(PLAIN, min_tokens=i + 3))
        yield replace(long, params=replace(PLAIN, seed=i, repetition_penalty=1.4, frequency_penalty=0.5))
        yield replace(long, params=replace(PLAIN, seed=i, presence_penalty=0.7, logit_bias=((i % 8, 2.5),), n=2))
        yield replace(long, prompt_ids=(*PROMPT, i % 8), params=replace(PLAIN, temperature=0.0, logprobs=0))


# A burst of n is n single rounds.


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("drafter", ["none", "decode"])
@pytest.mark.parametrize("num_rounds", thinned(ROUNDS))
def test_a_burst_is_its_single_rounds(num_rounds: int, drafter: str, depth: int) -> None:
    """`Watched` compares every event with the oracle, which runs alone, round by round."""
    bursts = Bursts(num_rounds, depth=depth, max_running=4)
    for request in ends(drafter):
        bursts.watched.add(request)
    outputs = bursts.watched.finish()
    bursts.watched.ask(params=replace(PLAIN, max_tokens=50), speculation=Speculation(drafter))  # nobody comes or goes
    bursts.watched.finish()
    assert {o.finish_reason for o in outputs.values()} == {FinishReason.LENGTH, FinishReason.STOP}
    assert max(bursts.late.rounds) == min(num_rounds, 16 if drafter == "none" else 15)  # as long as a window
    if drafter == "none":  # a step of windows has two passes anyway
        assert bursts.late.most_in_air == depth


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_rounds", [2, 5, 16])
def test_aborts_and_preemption_at_borders(num_rounds: int, depth: int) -> None:
    """Slots for two sequences of four, and every third request is aborted at a border of its own."""
    settings = {"num_slots": 50, "row_budget": 8, "max_running": 4, "prefix_cache": False}
    bursts = Bursts(num_rounds, depth=depth, **settings)
    watched = bursts.watched
    for i, request in enumerate([*ends("none"), *ends("none")]):
        request_id = watched.add(request)
        if i % 3 == 2:
            for _ in range(i % 4):
                watched.step()
            watched.abort(request_id - 1)
    watched.finish()
    assert watched.totals.preemptions > 3
    assert max(bursts.late.rounds) > 1


@pytest.fixture(scope="module", params=["numpy", "native"])
def world(request: pytest.FixtureRequest) -> World:
    """A tiny real model."""
    return {"numpy": numpy_world, "native": native_world}[request.param]("llama")


@pytest.mark.parametrize("drafter", ["none", "decode"])
def test_bursts_of_real_models_are_their_single_rounds(world: World, drafter: str) -> None:
    """Not a bit of tokens and log-probabilities differs, streamed or not, with aborts in between."""
    requests = [replace(r, is_streamed=i % 2 > 0) for i, r in enumerate(make_requests(7, drafter=drafter))]
    expected = [bits(outputs) for outputs in run(world.engine(max_burst=1), requests)]
    victim = Request([1, 2, 3], SamplingParams(max_tokens=60), Speculation("none"))
    for num_rounds, depth in ((2, 1), (3, 2), (5, 1), (16, 2)):
        engine = world.engine(cost=CHEAP, max_burst=num_rounds, depth=depth)
        found = run(engine, requests, abort_every=7, victim=victim)
        assert [bits(outputs) for outputs in found] == expected


class SpoiledRounds(WrappedBackend):
    """The last round of a burst gives another token: what the comparisons here have to find."""

    def submit(self, pass_: Pass) -> Ticket:
        result: PassResult = self.inner.submit(pass_).result()
        if result.burst is not None and result.burst.token_ids.size:
            last = result.burst.token_ids[:, -1]
            last[last >= 0] = (last[last >= 0] + 1) % VOCAB_SIZE
        return ReadyTicket(result)


def test_control_a_wrong_round_is_found() -> None:
    watched = Watched(16, cost=CHEAP, max_burst=5, wrap=SpoiledRounds)
    for request in ends("none"):
        watched.add(request)
    with pytest.raises(AssertionError, match=r"not what the oracle gives|no canonical pass drew"):
        watched.finish()


# Where bursts end.


@pytest.mark.parametrize(("is_streamed", "expected"), [(True, [1, 16, 3]), (False, [16, 4])])
def test_a_burst_is_no_longer_than_what_is_left(is_streamed: bool, expected: list[int]) -> None:
    """20 tokens in bursts of up to 16. The prompt's pass is their first round, unless a client waits for its token."""
    assert offline([Request(PROMPT, PLAIN, Speculation("none"), is_streamed=is_streamed)], max_burst=16) == expected


def test_prompts_ride_in_the_first_round_of_a_burst() -> None:
    """As requests come and go, nobody's rounds become single ones."""
    requests = [
        Request((*PROMPT, i % 8), replace(PLAIN, seed=i, max_tokens=8 + i), Speculation("none"), is_streamed=False)
        for i in range(9)
    ]
    rounds = offline(requests, max_burst=4, max_running=3)
    assert rounds.count(1) <= 1
    assert rounds.count(4) > 8


def offline(requests: list[Request], **config: int) -> list[int]:
    """The rounds of every pass of a batch; each output is the oracle's."""
    backend = LateBackend(FakeBackend(vocab_size=VOCAB_SIZE, num_slots=500))
    engine = Engine(
        backend, family=(1, 8, 64), drafters={"none": NoDrafter()}, cost=CHEAP,
        config=EngineConfig(num_slots=500, **config),
    )  # fmt: skip
    ids = {engine.add(request): request for request in requests}
    outputs = {}
    while engine.has_work:
        outputs |= {event.request_id: event.output for event in engine.step() if event.output is not None}
        engine.check()
    for request_id, request in ids.items():
        assert facts(outputs[request_id]) == facts(oracle(request)[0])
    return backend.rounds


def test_a_stop_string_wastes_no_more_than_one_burst() -> None:
    """The string ends at some token of a burst; the rounds behind it are cut off, and nothing of them is held."""
    request = next(r for r in ends("none") if r.text().can_stop)
    num_output = len(oracle(request)[0].token_ids)
    for num_rounds in ROUNDS:
        bursts = Bursts(num_rounds)
        bursts.watched.add(request)
        output = bursts.watched.finish()[0]
        assert len(output.token_ids) == num_output
        assert sum(bursts.late.rounds) - num_output <= num_rounds - 1


def test_a_new_request_waits_for_one_burst_at_most() -> None:
    bursts = Bursts(5)
    bursts.watched.ask(params=replace(PLAIN, max_tokens=60), speculation=Speculation("none"))
    for _ in range(3):
        bursts.watched.step()
    request_id = bursts.watched.ask((4, 2), PLAIN, speculation=Speculation("none"))
    assert request_id in {event.request_id for event in bursts.watched.step()}
    bursts.watched.finish()


def test_where_slots_are_short_bursts_shrink_before_anything_is_evicted_or_preempted() -> None:
    """64 slots: 20 are cached, two sequences need 22 each to their end. Nobody has to go for the sake of a burst."""
    bursts = Bursts(16, num_slots=64, max_len=22)
    watched = bursts.watched
    watched.ask((7,) * 19, replace(PLAIN, max_tokens=2), speculation=Speculation("none"))
    watched.finish()
    cached = len(list(watched.cached_prefixes()))
    for i in range(2):
        watched.ask((i,), replace(PLAIN, max_tokens=21), speculation=Speculation("none"))
    watched.step()
    while watched.engine.has_work:
        watched.step()
        assert len(list(watched.cached_prefixes())) >= cached
    assert watched.totals.preemptions == 0
    assert max(bursts.late.rounds) > 1


@pytest.mark.parametrize("needs", ["logprobs", "prompt in pieces", "suffix"])
def test_who_needs_the_host_has_single_rounds(needs: str) -> None:
    bursts = Bursts(16, family=(4,), row_budget=4)
    params = replace(PLAIN, logprobs=2) if needs == "logprobs" else PLAIN
    prompt = tuple(range(8)) * 5 if needs == "prompt in pieces" else PROMPT
    method = "suffix" if needs == "suffix" else "none"
    bursts.watched.ask(prompt, replace(params, max_tokens=9), speculation=Speculation(method))
    for _ in range(8):
        bursts.watched.step()
    assert set(bursts.late.rounds) == {1}
    bursts.watched.finish()


def test_who_finds_nothing_to_draft_looks_less_and_less_often() -> None:
    """In a text of many tokens nothing repeats itself. Where something does, drafts come in every step again."""

    def rounds(drafter: str, vocab_size: int) -> tuple[list[int], SampleOutput]:
        backend = LateBackend(FakeBackend(vocab_size=vocab_size, num_slots=300))
        drafters = {"none": NoDrafter(), "suffix": SuffixDrafter()}
        config = EngineConfig(num_slots=300, max_burst=8)
        engine = Engine(backend, family=(1, 16), drafters=drafters, config=config, cost=CHEAP, clock=lambda: 0.0)
        engine.add(Request((1, 2, 3), replace(PLAIN, max_tokens=100), Speculation(drafter)))
        (output,) = collect(engine).values()
        return backend.rounds, output

    found, output = rounds("suffix", 1000)
    assert output.stats.drafted == 0
    assert facts(output) == facts(rounds("none", 1000)[1])
    rested = np.cumsum([0, *found[1:]])
    assert found[:-1] == [1, *(min(8, 1 + int(n) // 4) for n in rested[: len(found) - 2])]
    found, output = rounds("suffix", 4)
    assert output.stats.drafted > 50
    assert max(found) <= 2


# One that needs the host among many that do not.


def policy(cost: CostTable, max_burst: int = 16) -> Policy:
    drafters = DrafterSet({"none": NoDrafter()}, vocab_size=VOCAB_SIZE, max_tail=16)
    return Policy((64,), cost, drafters, row_budget=64, max_draft=None, max_burst=max_burst)


@pytest.mark.parametrize(
    ("seconds", "host_seconds", "expected"),
    [
        (0.001, 0.0, 1),  # 32 in 1 ms, or 63 in 2 ms: the host costs nothing
        (0.001, 0.002, 2),  # 32 in 3 ms, or 63 in 4 ms
        (0.055, 0.030, 1),  # it would pay, but 110 ms are too long for a stream
    ],
)
def test_rounds_between_those_of_a_sequence_that_needs_the_host(
    seconds: float, host_seconds: float, expected: int
) -> None:
    cost = CostTable((1, 64), (seconds, seconds), (0.0, 0.0))
    load = RoundLoad(num_going=31, num_waiting=1, context_len=10, room=20, num_free=9, is_streamed=True)
    assert policy(cost).num_rounds(load, host_seconds) == expected
    alone = load._replace(num_waiting=0)
    assert policy(cost).num_rounds(alone, host_seconds) == min(9, int((0.1 if host_seconds else 0.025) / seconds))


@pytest.mark.parametrize(("host_seconds", "wait"), [(0.0, 0.025), (0.0004, 0.025), (0.0008, 0.04), (0.01, 0.1)])
def test_streams_wait_longer_where_the_host_would_take_more_than_a_fiftieth(host_seconds: float, wait: float) -> None:
    load = RoundLoad(num_going=1, num_waiting=0, context_len=10, room=99, num_free=99, is_streamed=True)
    found = policy(CostTable((1, 64), (0.001, 0.001), (0.0, 0.0)), max_burst=99).num_rounds(load, host_seconds)
    assert found == pytest.approx(wait / 0.001, abs=1)


@pytest.mark.parametrize("said", [0.0, 0.004])
def test_what_the_host_takes_inside_of_a_pass_is_its_own_time(said: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass takes 10 ms: all of them are its own unless the backend says that the host took some."""
    now, seen = [0.0], []
    monkeypatch.setattr(CostTable, "observe_pass", lambda cost, pass_, seconds, num_rounds: seen.append(seconds))

    class Slow(WrappedBackend):
        def submit(self, pass_: Pass) -> Ticket:
            now[0] += 0.010
            return ReadyTicket(replace(self.inner.submit(pass_).result(), host_seconds=said))

    backend = Slow(FakeBackend(vocab_size=VOCAB_SIZE, num_slots=300))
    engine = Engine(
        backend, family=(1, 16), drafters={"none": NoDrafter()}, config=EngineConfig(num_slots=300), cost=CHEAP,
        clock=lambda: now[0],
    )  # fmt: skip
    engine.add(Request(PROMPT, PLAIN))
    engine.step()
    assert seen == [pytest.approx(0.010 - said)]
    assert engine._scheduler.host_seconds == pytest.approx(said / 10)


def test_a_burst_that_nobody_streams_ends_within_half_a_second() -> None:
    """Ctrl-C, an abort or a newcomer waits for its end. Where nothing was timed, nothing is known of its seconds."""
    load = RoundLoad(num_going=4, num_waiting=0, context_len=10, room=90, num_free=90, is_streamed=False)
    for is_timed, expected in ((True, 5), (False, 16)):
        cost = CostTable((1, 64), (0.1, 0.1), (0.0, 0.0), learns=is_timed)
        assert policy(cost).num_rounds(load, 0.0) == expected


@pytest.mark.parametrize(
    ("rooms", "host_seconds", "expected"),
    [
        ((5, 9, 16), 0.0, 5),  # rounds of all places
        ((5, 9, 16), 0.012, 9),  # (5 + 9 + 9) / 15, not 15 / 11 nor 30 / 22
        ((1, 30, 30, 30), 0.004, 16),  # (1 + 3 * 16) / 18, not 4 / 3
        ((30, 40), 0.0, 16),
        ((), 0.012, 16),  # nobody waits
    ],
)
def test_a_burst_ends_with_answers_whose_places_others_wait_for(
    rooms: tuple[int, ...], host_seconds: float, expected: int
) -> None:
    cost = CostTable((1, 64), (0.001, 0.001), (0.0, 0.0))
    load = RoundLoad(num_going=3, num_waiting=0, context_len=10, room=40, num_free=90, is_streamed=False, rooms=rooms)
    assert policy(cost).num_rounds(load, host_seconds) == expected


@pytest.mark.parametrize("is_streamed", [True, False])
def test_passes_longer_than_anybody_may_wait_are_single_rounds(is_streamed: bool) -> None:
    """Also where others wait for places."""
    cost = CostTable((1, 64), (9.0, 9.0), (0.0, 0.0), learns=True)
    load = RoundLoad(3, 0, context_len=10, room=40, num_free=90, is_streamed=is_streamed, rooms=(6,))
    assert policy(cost).num_rounds(load, 0.0) == 1


@pytest.mark.parametrize("host_seconds", [0.0, 1.0])
def test_one_suffix_sequence_among_31_plain_ones_waits_at_most_twice_as_long(host_seconds: float) -> None:
    """Its rounds are counted against those of the others: with single rounds for all they would be as many."""
    backend = LateBackend(FakeBackend(vocab_size=VOCAB_SIZE, num_slots=2000))
    drafters = {"none": NoDrafter(), "suffix": SuffixDrafter()}
    config = EngineConfig(num_slots=2000, max_running=32, max_burst=16)
    engine = Engine(backend, family=(1, 32, 64), drafters=drafters, config=config, cost=CHEAP, clock=lambda: 0.0)
    plain, host = Speculation("none"), Speculation("suffix")
    requests = [Request((i % 8, 3, 1), replace(PLAIN, max_tokens=60), plain) for i in range(32)]
    requests[9] = replace(requests[9], params=replace(PLAIN, max_tokens=30), speculation=host)
    ids = [engine.add(request) for request in requests]
    outputs, waits, waited = {}, [], 0
    while engine.has_work:
        engine._scheduler.host_seconds = host_seconds
        before = len(backend.rounds)
        events = engine.step()
        waited += sum(backend.rounds[before:])
        for event in events:
            if event.request_id == ids[9] and event.logprobs:
                waits.append(waited)
                waited = 0
            if event.output is not None:
                outputs[event.request_id] = event.output
        if ids[9] in outputs:
            break
    assert max(waits) == (2 if host_seconds else 1)
    outputs |= {request_id: output for (request_id, _), output in collect(engine).items()}
    assert max(backend.rounds) == 16, "once it has ended the others are by themselves"
    for request_id, request in zip(ids, requests, strict=True):
        assert facts(outputs[request_id]) == facts(oracle(request)[0])


# Two flights in the air.


@pytest.mark.parametrize("num_rounds", [1, 4])
@pytest.mark.parametrize("num_steps", range(4))
def test_an_abort_with_two_flights_in_the_air(num_rounds: int, num_steps: int) -> None:
    """Its slots and its row wait for both; meanwhile nobody gets them, and the others go on as if nothing were."""
    bursts = Bursts(num_rounds, depth=2, max_running=3)
    watched = bursts.watched
    aborted, *_ = [
        watched.ask((i, 1), replace(PLAIN, max_tokens=30), speculation=Speculation("none")) for i in range(3)
    ]
    bursts.fill_the_air()
    for _ in range(num_steps):
        watched.step()
    assert bursts.late.num_in_air == 1, "and the next step submits a second one"
    watched.abort(aborted)
    watched.check()
    later = watched.ask((5, 5, 5), PLAIN, speculation=Speculation("none"))
    outputs = watched.finish()
    assert outputs[aborted].finish_reason is FinishReason.ABORT
    assert outputs[later].finish_reason is FinishReason.LENGTH
    assert bursts.late.most_in_air == 2


def test_aborted_requests_have_one_last_event_each() -> None:
    """Also if several are aborted between two steps."""
    engine = Bursts(4, depth=2).watched.engine
    ids = [engine.add(Request(PROMPT, PLAIN, Speculation("none"))) for _ in range(3)]
    engine.step()
    for request_id in ids:
        assert engine.abort(request_id)
        assert not engine.abort(request_id)
    ended = [event.request_id for event in engine.step() if event.output is not None]
    assert ended == ids


@pytest.mark.parametrize("num_rounds", [1, 3])
def test_preemption_waits_until_nothing_is_in_the_air(num_rounds: int) -> None:
    """Few slots: steps are planned ahead while there are some, and sequences preempted when there are none."""
    bursts = Bursts(num_rounds, depth=2, num_slots=60, row_budget=8, max_running=4)
    for i in range(12):
        bursts.watched.ask((i % 8, 1), replace(PLAIN, max_tokens=30, seed=i), speculation=Speculation("none"))
    bursts.watched.finish()
    assert bursts.watched.totals.preemptions > 3
    assert bursts.late.most_in_air == 2


def test_prompts_do_not_empty_the_air() -> None:
    """Whoever decodes goes on while a prompt is in the air, and rows of other prompts are planned meanwhile."""
    bursts = Bursts(4, depth=2, row_budget=8, max_running=4)
    none = Speculation("none")
    bursts.watched.ask((6, 6), replace(PLAIN, max_tokens=60), speculation=none)
    bursts.fill_the_air()
    for i in range(3):
        bursts.watched.ask((i, 1) * 10, PLAIN, speculation=none)
    for _ in range(8):  # 60 rows of prompts, at most 7 in a step
        bursts.watched.step()
        assert bursts.late.num_in_air == 1
    bursts.watched.finish()
    assert bursts.late.most_in_air == 2


def test_prompts_are_planned_ahead_whoever_drafts_behind_them() -> None:
    """Not those of requests that need the host, of which the control is one."""
    for params, most in ((PLAIN, 2), (replace(PLAIN, logprobs=1), 1)):
        bursts = Bursts(4, depth=2, row_budget=8, max_running=4)
        for i in range(3):
            bursts.watched.ask((i, 1) * 10, params, speculation=Speculation("suffix"))
        for _ in range(6):  # 60 rows of prompts
            bursts.watched.step()
        assert bursts.late.most_in_air == most
        bursts.watched.finish()


def test_where_nobody_streams_prompts_come_first() -> None:
    """All sequences decode together then. Streams must not wait: whoever is ready decodes beside the prompts."""
    num_passes = {}
    for is_streamed in (False, True):
        bursts = Bursts(1, depth=2, row_budget=8, max_running=5, prefix_cache=False)
        engine, ended = bursts.watched.engine, {}
        requests = [Request((i, 1) * 10, PLAIN, Speculation("none"), is_streamed=is_streamed) for i in range(5)]
        ids = [engine.add(request) for request in requests]
        while engine.has_work:
            ended |= {event.request_id: event.output for event in engine.step() if event.output is not None}
        for request_id, request in zip(ids, requests, strict=True):
            assert ended[request_id].token_ids == oracle(request)[0].token_ids
        num_passes[is_streamed] = len(bursts.late.rounds)
    assert num_passes[False] < num_passes[True]


@pytest.mark.parametrize(
    ("prompt_len", "depth", "is_streamed", "expected"),
    [(4, 1, False, [8, 8, 4]), (3, 1, False, [8, 6, 4]), (4, 2, False, [8, 8, 4, 4]), (4, 2, True, [8, 8, 2])],
)
def test_a_pass_that_prompts_fill_has_no_room_for_others(
    prompt_len: int, depth: int, is_streamed: bool, expected: list[int]
) -> None:
    """None of four prompts is cut so that those that are ready can decode: they would end apart. Where there is room
    for both, nobody waits. Nor does anybody go ahead of prompts in the air, unless somebody streams."""
    bursts = Bursts(1, depth=depth, row_budget=8, max_running=4, prefix_cache=False)
    engine = bursts.watched.engine
    for i in range(4):
        engine.add(Request((i + 1,) * prompt_len, PLAIN, Speculation("none"), is_streamed=is_streamed))
    while engine.has_work:
        engine.step()
    passes = [p for p in bursts.watched.backend.passes if p.kind is PassKind.CANONICAL]
    assert [int((p.rows.seq_rows > 0).sum()) for p in passes][: len(expected)] == expected


@pytest.mark.parametrize("drafter", ["none", "suffix", "decode"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("is_streamed", "scored", "stream_row_budget", "most"),
    [(False, None, 8, 16), (True, None, 8, 8), (False, 0, 8, 8), (True, None, None, 16)],  # the last is the control
)
def test_where_nobody_streams_prompts_fill_larger_passes(
    is_streamed: bool, scored: int | None, stream_row_budget: int | None, most: int, depth: int, drafter: str
) -> None:
    """One that is scored keeps them small, too. The last of four is the one, and with `decode` rows of windows join."""
    sizes = {"row_budget": 16, "stream_row_budget": stream_row_budget, "max_running": 4, "prefix_cache": False}
    bursts = Bursts(4, depth=depth, **sizes)
    engine, ended = bursts.watched.engine, {}
    requests = [Request((i, 1) * 10, PLAIN, Speculation(drafter), is_streamed=False) for i in range(4)]
    params = replace(PLAIN, prompt_logprobs=scored, max_tokens=40)
    requests[-1] = replace(requests[-1], params=params, is_streamed=is_streamed)
    ids = [engine.add(request) for request in requests]
    while engine.has_work:
        ended |= {event.request_id: event.output for event in engine.step() if event.output is not None}
        engine.check()
    for request_id, request in zip(ids, requests, strict=True):
        assert ended[request_id].digest == oracle(request)[0].digest
    passes = [p for p in bursts.watched.backend.passes if p.kind is PassKind.CANONICAL]
    assert max(int((p.rows.seq_rows > 0).sum()) for p in passes) == most


@pytest.mark.parametrize("num_rounds", [1, 4])
def test_what_ends_with_two_flights_in_the_air_is_published_as_it_was_committed(num_rounds: int) -> None:
    """A stop string ends a sequence whose next rounds are in the air. `Watched` looks at every cached slot."""
    bursts = Bursts(num_rounds, depth=2)
    watched = bursts.watched
    other = watched.ask((6, 6), replace(PLAIN, max_tokens=60), speculation=Speculation("none"))
    stopped = [watched.add(r) for r in ends("none") if r.text().can_stop and r.params == PLAIN]
    was_in_air = False
    while any(watched.streams[i][0].output is None for i in stopped):
        ended = {event.request_id for event in watched.step() if event.output is not None}
        was_in_air |= bool(ended & {*stopped}) and bursts.late.num_in_air > 0
    assert was_in_air
    whole = (*PROMPT, *watched.streams[stopped[-1]][0].output.token_ids)
    watched.step()
    watched.step()
    assert max(len(p) for p, _ in watched.cached_prefixes() if p == whole[: len(p)]) >= len(whole) - 1
    again = watched.ask(whole, PLAIN, speculation=Speculation("none"))
    outputs = watched.finish()
    assert outputs[again].stats.cached_tokens == len(whole) - 1
    assert outputs[other].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("num_rounds", [1, 4])
def test_a_flight_that_fails_takes_the_one_behind_it_down_and_nothing_else(num_rounds: int) -> None:
    """Each pass fails in turn, after it has written its K/V and moved the backend's state on."""
    for number in range(1, 14):
        bursts = Bursts(num_rounds, depth=2, failing=number.__eq__, deep=False)
        watched = bursts.watched
        for i in range(3):
            watched.ask((i, 1), replace(PLAIN, max_tokens=12 + i), speculation=Speculation("none"))
        num_failed = 0
        while watched.engine.has_work:
            try:
                watched.step()
            except RuntimeError:
                num_failed += 1
                watched.engine.check()
        watched.finish()
        assert num_failed == (number <= len(bursts.late.rounds))
        if num_rounds == 1:
            assert num_failed == 1


def test_a_failed_flight_holds_nothing_when_its_requests_are_gone() -> None:
    bursts = Bursts(4, depth=2, failing=(3).__eq__)
    watched = bursts.watched
    request_id = watched.ask(params=replace(PLAIN, max_tokens=40), speculation=Speculation("none"))
    watched.step()  # the prompt, and nothing can be planned ahead of it
    watched.step()
    with pytest.raises(RuntimeError):
        watched.step()
    watched.abort(request_id)
    watched.finish()


# Rows of the backend's tables, used again.

EDITED = SamplingParams(
    max_tokens=40, temperature=0.9, seed=99, repetition_penalty=2.0, presence_penalty=1.0, logit_bias=((1, 4.0),),
    stop_ids=(0, 3), min_tokens=30, top_k=2, top_p=0.6, min_p=0.4,
)  # fmt: skip


class Forgetful(WrappedBackend):
    """`bind` leaves one array as the row's last owner, if there was one, had it."""

    def __init__(self, inner: Backend, kept: str) -> None:
        super().__init__(inner)
        self._kept = kept
        self._bound: set[int] = set()

    def bind(self, seq_row: int, sampler: Sampler) -> None:
        before = np.array(self._array()[seq_row])
        self.inner.bind(seq_row, sampler)
        if seq_row in self._bound:
            self._array()[seq_row] = before
        self._bound.add(seq_row)

    def _array(self) -> np.ndarray:
        return {**self.resident._sampled, **vars(self.resident)}[self._kept]


def preempt_at(border: int, wrap: Callable[[Backend], Backend] = lambda backend: backend) -> Watched:
    """Two sequences swap their rows at a border: both are taken out, and come back in the other order."""
    watched = Watched(16, cost=CHEAP, max_burst=3, max_running=2, prefix_cache=False, wrap=wrap)
    watched.ask(params=replace(PLAIN, temperature=2.0), speculation=Speculation("none"))
    watched.ask((1, 1), EDITED, speculation=Speculation("none"))
    for _ in range(border):
        watched.step()
    running = list(watched.engine._roster.running)
    rows = [s.kv.seq_row for s in running]
    for sequence in running:
        watched.engine._roster.preempt(sequence)
    watched.step()
    if len(running) == 2:
        assert [s.kv.seq_row for s in running] == rows[::-1]
    return watched


@pytest.mark.parametrize("border", range(1, 8))
def test_a_new_row_at_any_border_changes_no_bit(border: int) -> None:
    watched = preempt_at(border)
    watched.finish()
    assert watched.totals.preemptions > 0


@pytest.mark.parametrize(
    "kept", ["seeds", "temperature", "top_k", "top_p", "log_min_p", "min_lens", "limits", "stop_ids", "has_edits"]
)
def test_control_every_array_of_a_recycled_row_is_written(kept: str) -> None:
    with pytest.raises((AssertionError, IndexError)):
        preempt_at(2, partial(Forgetful, kept=kept)).finish(200)


@pytest.mark.parametrize(("num_going", "trip", "host_seconds", "expected"), [
    (1, 0.0003, 0.0, 3),  # two milliseconds each: 6 are enough for the host to send the next
    (1, 0.0003, 0.002, 8),  # the host takes longer
    (9, 0.0003, 0.0, 16),  # where some end, others use the rounds
    (1, 0.0, 0.0, 16),  # bursts are not sent ahead
])  # fmt: skip
def test_bursts_of_few_are_short_where_the_next_is_sent_meanwhile(
    num_going: int, trip: float, host_seconds: float, expected: int
) -> None:
    cost = CostTable((1, 64), (0.002, 0.002), (0.0, 0.0), trip=trip)
    load = RoundLoad(num_going=num_going, num_waiting=0, context_len=10, room=99, num_free=99, is_streamed=False)
    assert policy(cost, max_burst=16).num_rounds(load, host_seconds) == expected
