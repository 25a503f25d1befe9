"""Decode-verify-rollback: whatever regular decoding drew in fast passes, a client gets the oracle's bits.

The fake backend's fast passes differ from its canonical ones by themselves, in every bit of K/V and in many tokens.
Where counts are worked out by hand, fast passes agree with canonical ones but for the faults that a test makes.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pytest

from tests.support.adversaries import PushFails, collect, keep_apart
from tests.support.decoding import (
    FAMILY,
    MAX_LEN,
    PROMPT,
    SAMPLED,
    STEEP_COST,
    Watched,
    finish_reasons,
    letters,
    oracle,
)
from tests.support.fake_backend import FakeBackend
from tests.support.faulty_backends import (
    AgreeingFastPasses,
    AtPositions,
    AtRate,
    Bf16FastPasses,
    FaultyFastPasses,
    WrappedBackend,
    bf16,
)
from tests.support.scale import is_whole, scaled, thinned
from tests.support.tiny_models import TinyConfig, make_tensors
from verispec.backends.audit import audit
from verispec.backends.numpy_backend import NumpyBackend
from verispec.backends.options import LoadedModel, NumpyOptions
from verispec.backends.protocol import Backend, Pass, PassKind, PassResult, Ticket
from verispec.config import EngineConfig
from verispec.engine import Engine, Request
from verispec.errors import DeterminismError
from verispec.spec.decode import DecodeConfig, DecodeDrafter
from verispec.spec.drafter import Held
from verispec.spec.none import NoDrafter
from verispec.spec.registry import DraftSetup, make_drafters
from verispec.spec.speculation import AUTO, Speculation
from verispec.types import FinishReason, SampleOutput, SamplingParams, SequenceStats

VOCAB_SIZE = 8
WINDOW_LENS = (1, 2, 3, 8, 32, 64)
NUM_COMPARED = 840  # sequences per window length; all lengths together, times 20, make 10^5
Counts = tuple[int, int, int]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Broken texts are logged with tracebacks."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def counts(stats: SequenceStats) -> Counts:
    return stats.replays, stats.mismatches, stats.recomputed


def held(watched: Watched, request_id: int) -> Held | None:
    """The window of a request, as its drafter states it."""
    found = watched.decode.state(watched.sequence(request_id))
    return found if isinstance(found, Held) else None


def faults(times: Mapping[int, int | None], token_id: int | None = None) -> AtPositions:
    return AtPositions(times, vocab_size=VOCAB_SIZE, token_id=token_id)


# The equality oracle.


def random_request(seed: int) -> Request:
    rng = random.Random(seed)
    prompt = tuple(rng.choices(range(4), weights=(6, 2, 1, 1), k=rng.choice((1, 2, 3, 5, 8, 13, 21))))
    max_tokens = rng.choices((1, 2, 4, 7, 12, 20, 40, None), weights=(2, 3, 6, 8, 8, 3, 1, 1))[0]
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min(max_tokens or MAX_LEN, rng.choice((0, 0, 0, 2, 6))),
        temperature=rng.choice((0.0, 0.7, 1.0, 1.5)),
        top_k=rng.choice((0, 0, 3)),
        top_p=rng.choice((1.0, 1.0, 0.8)),
        seed=rng.choice((0, 1, 2**64 - 1)),
        n=rng.choice((1, 1, 1, 1, 2, 3)),
        stop_ids=rng.choice(((), (), (6,))),
        repetition_penalty=rng.choice((1.0, 1.0, 1.3)),
        presence_penalty=rng.choice((0.0, 0.0, 0.6)),
        frequency_penalty=rng.choice((0.0, 0.0, -0.4)),
        logit_bias=rng.choice(((), (), ((3, 1.5),))),
        logprobs=rng.choice((None, 0, 1, 3)),
        prompt_logprobs=rng.choice((None, None, None, None, 0, 2)),
        deterministic=rng.random() < 0.88,
    )
    stop = rng.choice(((), (), ("cab",), ("ad", "dd"), ("e",)))
    text = rng.choices((letters(*stop), PushFails), weights=(20, 2))[0]
    return Request(prompt, params, eos_ids=rng.choice(((), (7,))), text=text)


MENU = tuple(random_request(seed) for seed in range(300))  # few enough that the oracle runs each of them once
SETTINGS: tuple[dict[str, object], ...] = (
    {},
    {"row_budget": 4, "max_running": 4},  # windows are short, and only their fronts are verified
    {"num_slots": MAX_LEN, "prefix_cache": False},  # sequences are preempted
    {"num_slots": MAX_LEN + 20, "row_budget": 8},  # and cached prefixes evicted
    {"family": (64,), "cost": STEEP_COST, "drafters": ("decode", AUTO)},  # `auto` decodes regularly
    {"max_running": 1},
    {"row_budget": 16, "prefix_cache": False, "max_draft": 5},
)


def run_a_crowd(window_len: int, settings: dict[str, object], rng: random.Random, least: int) -> Watched:
    """At least so many sequences that the oracle is compared with, coming and going; some are aborted."""
    options = {"drafters": ("decode", "decode", "decode", AUTO, "none", "suffix"), **settings}
    drafters: tuple[str, ...] = options.pop("drafters")  # type: ignore[assignment]
    watched = Watched(window_len, deep=False, apart=rng.random() < 0.5, **options)  # type: ignore[arg-type]
    while least > 0 or watched.engine.has_work:
        while least > 0 and watched.engine.num_waiting < 5:
            request = rng.choice(MENU)
            least -= request.params.n if request.params.deterministic else 0
            request_id = watched.add(replace(request, speculation=Speculation(rng.choice(drafters))))
            if rng.random() < 0.04:
                least += request.params.n if request.params.deterministic else 0
                for _ in range(rng.randrange(12)):
                    watched.step()
                watched.abort(request_id)
        watched.step()
    watched.finish()
    return watched


@pytest.mark.parametrize("window_len", thinned(WINDOW_LENS))
def test_a_crowd_gets_the_oracles_bits(window_len: int) -> None:
    """Every event is compared with the oracle as it arrives; here it is counted that this means something."""
    rng, seen = random.Random(window_len), Counter[str]()
    needed, block = scaled(NUM_COMPARED), scaled(NUM_COMPARED) // (2 * len(SETTINGS))
    for i in range(2 * len(SETTINGS)):
        watched = run_a_crowd(window_len, SETTINGS[i % len(SETTINGS)], rng, block)
        for stream in (s for samples in watched.streams.values() for s in samples):
            assert stream.output is not None
            stats = stream.output.stats
            seen["compared"] += stream.truth is not None and not stream.is_aborted
            seen["aborted"] += stream.is_aborted
            seen["fast"] += stream.truth is None
            seen["cached"] += stats.cached_tokens
            seen[stream.output.finish_reason] += 1
            is_auto = stream.request.speculation.method == AUTO
            seen[f"auto {'with' if stats.chosen['decode'] else 'without'} windows"] += is_auto
        seen["joined"] += watched.num_joined
        for name in ("replays", "mismatches", "recomputed", "preemptions", "accepted"):
            seen[name] += getattr(watched.totals, name)
    assert seen["compared"] >= needed
    if not is_whole():
        return
    assert seen["replays"] >= 600
    # The token behind a window is drawn by no fast pass: of short windows less can differ.
    assert seen["mismatches"] >= (150 if window_len > 2 else 100)
    assert seen["accepted"] >= 800
    assert (seen["recomputed"] > seen["mismatches"]) is (window_len > 1)
    happened = ["aborted", "fast", "joined", "cached", "preemptions", "auto without windows", *FinishReason]
    happened += ["auto with windows"] if window_len >= 8 else []  # shorter ones never pay
    assert {name: seen[name] for name in happened if seen[name] < 5} == {}


# Rollback, with every count worked out by hand. A prompt of 3 tokens: its pass draws the token with index t = 3, so the
# first window holds t = 4 .. 3 + N, and its k-th token is t = 3 + k.


@pytest.mark.parametrize(
    ("family", "k", "expected", "num_drafted"),
    [
        ((8,), 1, (2, 1, 4), 7),
        ((8,), 2, (2, 1, 3), 6),
        ((8,), 3, (2, 1, 2), 5),
        ((8,), 4, (1, 1, 1), 4),
        ((8,), 99, (1, 0, 0), 4),
        # 4 rows verify 3 tokens, so that is how long windows are; t = 7 is then drawn by the replay alone.
        ((4,), 1, (2, 1, 3), 6),
        ((4,), 2, (2, 1, 2), 5),
        ((4,), 3, (2, 1, 1), 4),
        ((4,), 4, (1, 0, 0), 3),
        ((4,), 99, (1, 0, 0), 3),
    ],
)
def test_a_mismatch_at_each_position_of_a_window_of_4(
    family: tuple[int, ...], k: int, expected: Counts, num_drafted: int
) -> None:
    """6 tokens: 1 from the prompt, k from the first window, then a window of what is left but one, and that one."""
    watched = Watched(4, agreeing=True, redraw=faults({3 + k: 1}), family=family)
    watched.ask(params=replace(SAMPLED, max_tokens=6))
    stats = watched.finish()[0].stats
    assert counts(stats) == expected
    assert (stats.drafted, stats.accepted, stats.fast_passes) == (num_drafted, num_drafted - expected[2], num_drafted)


@pytest.mark.parametrize(("window_len", "k"), [(n, k) for n in (1, 2, 3, 8, 32) for k in sorted({1, (n + 1) // 2, n})])
def test_a_mismatch_in_windows_of_every_length(window_len: int, k: int) -> None:
    """N + 2 tokens: the k-th is wrong, so N - k + 1 are dropped, and a window of N - k follows if there is room."""
    watched = Watched(window_len, agreeing=True, redraw=faults({3 + k: 1}), family=(64,))
    watched.ask(params=replace(SAMPLED, max_tokens=window_len + 2))
    stats = watched.finish()[0].stats
    assert counts(stats) == (1 + (k < window_len), 1, window_len - k + 1)
    assert stats.drafted == window_len + (window_len - k)


def test_mismatches_in_a_row() -> None:
    """t = 4 is wrong, then t = 5 in the window after it: 4 + 3 dropped, and a window of 2 is right."""
    watched = Watched(4, agreeing=True, redraw=faults({4: None, 5: None}), family=(64,))
    watched.ask(params=replace(SAMPLED, max_tokens=6))
    stats = watched.finish()[0].stats
    assert (counts(stats), stats.drafted) == ((3, 2, 7), 9)


def test_when_every_drafted_token_is_wrong_each_replay_commits_one() -> None:
    """Windows of 4, 3, 2 and 1 tokens, one token each; the prompt's pass and the last plain row give the others."""
    watched = Watched(4, agreeing=True, redraw=AtRate(1.0, vocab_size=VOCAB_SIZE))
    watched.ask(params=replace(SAMPLED, max_tokens=6))
    stats = watched.finish()[0].stats
    assert (counts(stats), stats.drafted, stats.accepted) == ((4, 4, 10), 10, 0)
    assert stats.passes == 6
    assert watched.engine.totals.recomputed_fraction == 10 / 16


@pytest.mark.parametrize("family", [(3,), (64,)], ids=["a full pass", "a pass with room"])
def test_a_mismatch_at_the_last_position_of_a_window_is_counted(family: tuple[int, ...]) -> None:
    """A prompt of 2 draws t = 2, windows hold (3, 4), (5, 6), (7, 8) and (9, 10), and the second is always wrong."""
    watched = Watched(2, agreeing=True, redraw=faults(dict.fromkeys((4, 6, 8, 10), 1)), family=family)
    watched.ask((0, 1), replace(SAMPLED, max_tokens=10))
    stats = watched.finish()[0].stats
    assert (counts(stats), stats.drafted) == ((4, 4, 4), 8)


@pytest.mark.parametrize(
    ("k", "expected", "num_committed", "num_rejected"),
    [(1, (1, 1, 3), 1, 3), (3, (1, 1, 1), 3, 1), (4, (1, 0, 0), 4, 0), (99, (1, 0, 0), 4, 0)],
)
def test_where_rows_do_not_suffice_the_front_of_a_window_is_verified(
    k: int, expected: Counts, num_committed: int, num_rejected: int
) -> None:
    """4 of 8 rows belong to plain sequences, so 3 of a window's 7 tokens are verified, and the other 4 are dropped."""
    watched = Watched(7, agreeing=True, redraw=faults({3 + k: 1}), family=(8,), apart=True)
    watched.ask(params=replace(SAMPLED, max_tokens=40))
    for _ in range(5):  # the prompt, and 4 tokens
        watched.step()
    for i in range(4):
        watched.ask((i,), replace(SAMPLED, max_tokens=40), speculation=Speculation("none"))
    for _ in range(3):
        watched.step()
    assert held(watched, 0) == Held(7, 7, is_ready=True)
    event = next(e for e in watched.step() if e.request_id == 0)
    assert (len(event.logprobs), len(event.rejected_ids)) == (num_committed, num_rejected)
    stats = watched.sequence(0).stats
    assert (counts(stats), stats.drafted) == (expected, 7)
    assert held(watched, 0) is None, "the rest is dropped, not repaired"
    watched.finish()


@pytest.mark.parametrize("is_traced", [False, True])
def test_windows_on_cheaper_weights_are_counted_as_others_are(is_traced: bool) -> None:
    """Drawn and replayed by the backend, or by the host. Windows of 4 behind the first token: t = 4..7, of which 6 is
    wrong, 7..10, and 12..15, whose last is wrong; no room is left for another."""
    fake = FakeBackend(vocab_size=VOCAB_SIZE)
    fake.limits = replace(fake.limits, fast_weights="int4")
    backend = FaultyFastPasses(AgreeingFastPasses(fake), faults({6: 1, 15: 1}))
    engine = Engine(backend, family=FAMILY, drafters=make_drafters(DraftSetup(backend=backend, draft_len=4)))
    request = Request(PROMPT, replace(SAMPLED, max_tokens=14))
    engine.add(replace(request, is_traced=is_traced, speculation=Speculation("decode")))
    (output,) = collect(engine).values()
    stats = output.stats
    assert output.digest == oracle(request)[0].digest
    assert (counts(stats), stats.drafted, stats.accepted) == ((3, 2, 3), 12, 9)
    totals = engine.totals
    assert (totals.replays, totals.mismatches, totals.recomputed) == (3, 2, 3)


def endings() -> Iterator[tuple[str, Request, int, int]]:
    """A request that ends behind its 9th token or later in each possible way: its last t, and its last token."""
    for seed in range(100):
        long = Request(PROMPT, replace(SAMPLED, max_tokens=20, seed=seed), text=letters())
        tokens = oracle(long)[0].token_ids
        new = [i for i, token_id in enumerate(tokens) if token_id not in tokens[:i] and i >= 8]
        if new:
            break
    last = new[0]
    token_id, t = tokens[last], len(PROMPT) + last
    pair = "".join(chr(ord("a") + i) for i in tokens[last - 1 : last + 1])
    yield "eos", replace(long, eos_ids=(token_id,)), t, token_id
    yield "stop id", replace(long, params=replace(long.params, stop_ids=(token_id,))), t, token_id
    yield "stop string", replace(long, text=letters(pair[1])), t, token_id
    yield "longer stop string", replace(long, text=letters(pair)), t, token_id
    yield "max_tokens", replace(long, params=replace(long.params, max_tokens=last + 1)), t, token_id


ENDINGS = {name: (request, t, token_id) for name, request, t, token_id in endings()}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("settings", [{"window_len": 4}, {"window_len": 8, "family": (4,)}, {"window_len": 32}])
def test_a_mismatch_at_and_around_every_end(ending: str, settings: dict[str, int]) -> None:
    """The wrong token stands at each place up to the end in turn, and once the end itself is missed twice in a row."""
    request, last, _ = ENDINGS[ending]
    num_mismatches = 0
    for positions in (*((t,) for t in range(4, last + 1)), (last - 1, last)):
        watched = Watched(agreeing=True, redraw=faults(dict.fromkeys(positions)), **settings)  # type: ignore[arg-type]
        watched.add(request)
        output = watched.finish()[0]
        assert len(output.token_ids) == last - 2
        assert output.finish_reason is (FinishReason.LENGTH if ending == "max_tokens" else FinishReason.STOP)
        assert output.stats.mismatches <= len(positions)
        num_mismatches += output.stats.mismatches
    assert num_mismatches >= last - 4


@pytest.mark.parametrize("ending", ["eos", "stop id"])
def test_a_finish_in_uncommitted_text_is_only_a_reason_to_verify(ending: str) -> None:
    """Regular decoding ends the text too early: it is verified at once, found wrong, and the sequence goes on."""
    request, last, token_id = ENDINGS[ending]
    for t in range(4, last):
        watched = Watched(16, agreeing=True, redraw=faults({t: None}, token_id=token_id), family=(64,))
        watched.add(request)
        for _ in range(t - 3 + 1):  # the prompt, then the window up to the wrong finish
            assert not any(event.output for event in watched.step())
        assert held(watched, 0) == Held(t - 3, 16, is_ready=True)
        assert watched.real_rows(PassKind.CANONICAL) == [3]
        (event,) = watched.step()
        assert watched.real_rows(PassKind.CANONICAL)[1] == t - 3 + 1, "all of the window, and the row before it"
        assert (event.output, event.rejected_ids, len(event.logprobs)) == (None, (token_id,), t - 3)
        stats = watched.finish()[0].stats
        assert stats.mismatches == 1


@pytest.mark.parametrize("ending", ["stop string", "longer stop string"])
def test_a_stop_string_in_uncommitted_text_is_nothing_to_a_window(ending: str) -> None:
    """Text is made of committed tokens alone: the window grows on behind the string, and commit cuts it there."""
    request, last, _ = ENDINGS[ending]
    num_output = last - 2
    watched = Watched(16, agreeing=True, family=(64,))
    watched.add(request)
    for _ in range(1 + 16):
        assert not any(event.output for event in watched.step())
    assert held(watched, 0) == Held(16, 16, is_ready=True)
    (event,) = watched.step()
    assert event.output is not None
    assert (len(event.output.token_ids), event.num_accepted) == (num_output, num_output - 1)
    watched.finish()


@pytest.mark.parametrize("at", [4, 6])
def test_a_fast_pass_that_can_draw_nothing_is_only_a_reason_to_verify(at: int) -> None:
    watched = Watched(4, agreeing=True, redraw=faults({at: 1}, token_id=-1), family=(64,))
    watched.ask(params=replace(SAMPLED, max_tokens=9))
    stats = watched.finish()[0].stats
    # t = 4 is the first of a window, so a canonical pass runs that replays nothing; then come windows of 4 and 1.
    # At t = 6 the window (4, 5) is replayed, and then one of 4.
    assert counts(stats) == (2, 0, 0)


@pytest.mark.slow
def test_rollback_under_preemption() -> None:
    """Slots for two sequences, which are leased for whole windows: windows of the younger are lost in the middle."""
    watched = Watched(
        6, agreeing=True, redraw=AtRate(0.25, vocab_size=VOCAB_SIZE), num_slots=56, prefix_cache=False, row_budget=8
    )
    for i in range(48):
        watched.ask((i % 3, 1, 2), replace(SAMPLED, max_tokens=25, seed=i))
    watched.finish()
    assert watched.totals.preemptions > 10
    assert watched.totals.mismatches > 20
    assert watched.totals.drafted > watched.totals.accepted + watched.totals.recomputed, "windows were lost"


@pytest.mark.parametrize("num_decoded", range(1, 5))
def test_a_preempted_window_is_lost_and_nothing_else(num_decoded: int) -> None:
    watched = Watched(5, agreeing=True, redraw=faults({5: 1}))
    watched.ask(params=replace(SAMPLED, max_tokens=6))
    for _ in range(1 + num_decoded):
        watched.step()
    sequence = watched.sequence(0)
    assert held(watched, 0) == Held(num_decoded, 4, is_ready=num_decoded == 4)
    watched.engine._roster.preempt(sequence)
    watched.check()
    assert (held(watched, 0), sequence.kv.lease, sequence.slots) == (None, None, [])
    stats = watched.finish()[0].stats
    assert stats.drafted - stats.accepted - stats.recomputed == num_decoded
    assert stats.preemptions == 1


@pytest.mark.parametrize("num_steps", range(14))
def test_abort_at_every_step_of_a_window(num_steps: int) -> None:
    watched = Watched(4, agreeing=True, redraw=faults({6: 2}))
    aborted, other = watched.ask(), watched.ask((0, 2))
    for _ in range(num_steps):
        watched.step()
    is_live = watched.streams[aborted][0].output is None
    assert watched.abort(aborted) is is_live
    watched.check()
    assert len(watched.engine._pool.leases) <= 1
    outputs = watched.finish()
    assert outputs[other].finish_reason is FinishReason.LENGTH
    assert outputs[aborted].finish_reason is (FinishReason.ABORT if is_live else FinishReason.LENGTH)


# What a client sees, and what others may share.


def test_streams_carry_committed_tokens_only() -> None:
    """Windows of 6 beside others: nothing comes while a window grows, and what a replay drops is never shown."""
    watched = Watched(6, redraw=AtRate(0.1, vocab_size=VOCAB_SIZE), family=(32,))
    request_id = watched.ask(params=replace(SAMPLED, max_tokens=40), text=letters())
    num_silent = 0
    while watched.engine.has_work:
        before = len(watched.sequence(request_id).token_ids)
        events = watched.step()
        kinds = {p.kind for p in watched.backend.passes}
        assert sum(len(e.logprobs) for e in events) == len(watched.sequence(request_id).token_ids) - before
        if kinds == {PassKind.FAST}:
            assert events == []
            num_silent += 1
    stats = watched.finish()[request_id].stats
    assert num_silent == stats.fast_passes > 30
    assert stats.mismatches > 2


def test_only_committed_canonical_kv_is_published() -> None:
    """Requests that share prefixes come one after another while windows are open: `Watched` looks at every slot."""
    watched = Watched(5, num_slots=120)
    for i in range(36):
        watched.ask((0, 1, 2, i % 3) * 2, replace(SAMPLED, seed=i % 4, deterministic=i % 5 > 0))
        for _ in range(3):
            watched.step()
    watched.finish()
    assert sum(s.output.stats.cached_tokens for samples in watched.streams.values() for s in samples) > 50
    assert watched.totals.mismatches > 20
    assert len(list(watched.cached_prefixes())) > 50


def test_a_window_never_reaches_the_cache_even_if_its_sequence_ends() -> None:
    watched = Watched(8, agreeing=True)
    request_id = watched.ask(params=replace(SAMPLED, max_tokens=30))
    for _ in range(6):
        watched.step()
    assert held(watched, request_id) == Held(5, 8, is_ready=False)
    watched.abort(request_id)
    assert max(len(prefix) for prefix, _ in watched.cached_prefixes()) == len(PROMPT)


# Selective and grouped verification.


def test_ready_windows_are_verified_together() -> None:
    """Four sequences: windows of 4 with the row before them fill a pass of 20; then 4 windows of 2, 12 rows."""
    watched = Watched(4, agreeing=True, family=(20,), apart=True)
    for i in range(4):
        watched.ask((0, 1, i), replace(SAMPLED, max_tokens=9))
    watched.finish()
    assert watched.real_rows(PassKind.CANONICAL) == [12, 20, 12]
    assert watched.real_rows(PassKind.FAST) == [4] * 6
    assert watched.totals.replays == 8


def test_a_window_that_does_not_fit_beside_older_ones_waits_as_it_is() -> None:
    """A pass of 16 takes three windows of 4; the fourth is verified a step later, whole, while the others decode."""
    watched = Watched(4, agreeing=True, family=(16,), apart=True)
    for i in range(4):
        watched.ask((0, 1, i), replace(SAMPLED, max_tokens=9))
    for _ in range(6):
        watched.step()
    assert watched.real_rows(PassKind.CANONICAL) == [12, 15]
    assert held(watched, 3) == Held(4, 4, is_ready=True)
    watched.step()
    assert watched.real_rows(PassKind.CANONICAL) == [12, 15, 5]
    assert watched.real_rows(PassKind.FAST) == [4] * 4 + [3]
    watched.finish()
    # Then windows of 2, of which the fourth is verified with the others when it has 1.
    assert (watched.totals.replays, watched.totals.drafted, watched.totals.accepted) == (8, 23, 23)


def test_unfinished_windows_join_a_replay_that_has_room() -> None:
    """The second request comes two steps later: its 2 tokens are verified with the first one's 4, in one pass of 8."""
    watched = Watched(4, agreeing=True, family=(8,), apart=True)
    first = watched.ask(params=replace(SAMPLED, max_tokens=20))
    for _ in range(2):
        watched.step()
    second = watched.ask((3, 1, 0), replace(SAMPLED, max_tokens=20))
    for _ in range(3):
        watched.step()
    assert [held(watched, i) for i in (first, second)] == [Held(4, 4, is_ready=True), Held(2, 4, is_ready=False)]
    events = watched.step()
    assert watched.real_rows(PassKind.CANONICAL) == [3, 3, 8]
    assert {e.request_id: (len(e.logprobs), e.num_accepted) for e in events} == {first: (5, 4), second: (3, 2)}
    watched.finish()


@pytest.mark.parametrize("apart", [False, True])
def test_fast_rows_run_in_a_canonical_pass_that_has_room(apart: bool) -> None:
    """A prompt of 3 beside a row of regular decoding and a row without determinism: one pass of 8, or two passes."""
    watched = Watched(4, family=(8,), apart=apart)
    decoding = watched.ask(params=replace(SAMPLED, max_tokens=20))
    free = watched.ask((2, 1, 0), replace(SAMPLED, max_tokens=20, deterministic=False))
    watched.step()
    watched.ask((3, 1, 0), replace(SAMPLED, max_tokens=20))
    watched.step()
    last = watched.passes[1:]
    assert [(p.kind, int((p.rows.seq_rows > 0).sum())) for p in last] == (
        [(PassKind.CANONICAL, 3), (PassKind.FAST, 2)] if apart else [(PassKind.CANONICAL, 5)]
    )
    assert watched.num_joined == (not apart)
    assert held(watched, decoding) == Held(1, 4, is_ready=False), "what it drew is uncommitted all the same"
    assert watched.sequence(free).kv.canonical_len == 3, (
        "and what it wrote is not canonical: others must not rely on it"
    )
    watched.finish()


def test_requests_without_determinism_have_no_canonical_rows_behind_their_prompt() -> None:
    watched = Watched(4)
    exact = [watched.ask((0, 1, i), replace(SAMPLED, max_tokens=20)) for i in range(3)]
    free = [watched.ask((1, 0, i), replace(SAMPLED, max_tokens=20, deterministic=False)) for i in range(2)]
    outputs = watched.finish()
    assert [outputs[i].stats.passes for i in free] == [1] * 2
    assert [counts(outputs[i].stats) for i in free] == [(0, 0, 0)] * 2
    assert [outputs[i].stats.fast_passes for i in free] == [19] * 2
    assert all(outputs[i].stats.replays > 1 for i in exact)


ONE_LEFT = {"a prompt of one token": (2,), "a cached prompt": (0, 1, 2), "a chunk that leaves one token": (0,) * 5}


def with_one_token_left(case: str, params: SamplingParams) -> tuple[Watched, int]:
    """A request of whose prompt one token is left, which is like any row of generation; and its id."""
    watched = Watched(8, family=(4,))
    if case == "a cached prompt":
        watched.ask(ONE_LEFT[case], replace(SAMPLED, max_tokens=1))
        watched.finish()
    request_id = watched.ask(ONE_LEFT[case], params)
    if case == "a chunk that leaves one token":
        watched.step()
    return watched, request_id


@pytest.mark.parametrize("case", ONE_LEFT)
def test_a_window_opens_behind_the_prompt_so_that_its_first_token_comes_at_once(case: str) -> None:
    """Else a cached prompt would answer a window later than one that is not, and its other samples would wait too."""
    watched, request_id = with_one_token_left(case, replace(SAMPLED, max_tokens=20, n=2))
    (event,) = watched.step()
    assert (event.request_id, len(event.logprobs)) == (request_id, 1)
    watched.finish()


@pytest.mark.parametrize("case", ONE_LEFT)
def test_requests_without_determinism_never_open_windows(case: str) -> None:
    """One that was cut would stay with a sequence of fast passes, and end the step with KeyError: it did once."""
    params = replace(SAMPLED, max_tokens=20, temperature=0.2, deterministic=False)
    watched, request_id = with_one_token_left(case, params)
    stats = watched.finish()[request_id].stats
    assert (counts(stats), stats.fast_passes) == ((0, 0, 0), 19)


@pytest.mark.parametrize("window_len", [4, 7, 8, 30])
@pytest.mark.parametrize("row_budget", [2, 4])
def test_windows_are_no_longer_than_a_pass_can_verify(window_len: int, row_budget: int) -> None:
    """The row before a window needs a place too. Where nothing mismatches no row runs twice in passes of one kind."""
    watched = Watched(window_len, agreeing=True, family=(2, 4), row_budget=row_budget)
    watched.ask((0, 1), replace(SAMPLED, max_tokens=50))
    stats = watched.finish()[0].stats
    assert (stats.mismatches, stats.recomputed) == (0, 0)
    assert stats.accepted == stats.drafted == sum(watched.real_rows(PassKind.FAST))
    assert max(watched.real_rows(PassKind.CANONICAL)) == row_budget
    # 49 tokens behind the prompt's, `row_budget` a replay; what is left over is a shorter window, or a plain row.
    assert stats.replays == 49 // row_budget + (49 % row_budget > 1)
    for kind in PassKind:
        positions = [
            int(p) for pass_ in watched.passes if pass_.kind is kind for p in pass_.rows.positions[pass_.rows.slots > 1]
        ]
        assert len(set(positions)) == len(positions), f"a row ran twice in {kind.value} passes"


def test_only_canonical_passes_are_padded() -> None:
    watched = Watched(3)
    for i in range(5):
        watched.ask((0, 1, i), replace(SAMPLED, deterministic=i > 0))
    watched.finish()
    for pass_ in watched.passes:
        num_rows = int((pass_.rows.seq_rows > 0).sum())
        smallest = next(m for m in FAMILY if m >= num_rows)
        assert len(pass_.rows) == (smallest if pass_.kind is PassKind.CANONICAL else num_rows)


# Without a family.


def test_without_a_family_deterministic_requests_are_refused_with_the_reason() -> None:
    engine = Engine(FakeBackend(), family=(), drafters=make_drafters(), no_family_reason="the moon is full")
    with pytest.raises(DeterminismError, match="the moon is full"):
        engine.add(Request(PROMPT))
    assert not engine.has_work


@pytest.mark.parametrize("drafter", ["none", "suffix", "decode", AUTO])
def test_without_a_family_the_others_are_served_in_fast_passes(drafter: str) -> None:
    watched = Watched(4, family=(), row_budget=16, max_running=6)
    params = replace(SAMPLED, deterministic=False, prompt_logprobs=1)
    for i in range(9):
        watched.ask((0, 1, 2, i % 3) * 5, replace(params, n=1 + i % 2), speculation=Speculation(drafter))
    outputs = watched.finish()
    assert finish_reasons(watched) == {FinishReason.LENGTH}
    assert {p.kind for p in watched.passes} == {PassKind.FAST}
    assert watched.real_rows(PassKind.FAST)[0] == 16, "prompts are cut by the row budget"
    assert list(watched.cached_prefixes()) == []
    assert all(len(o.prompt_logprobs) == 19 and o.stats.passes == o.stats.replays == 0 for o in outputs.values())


# A pass that fails, and time.


class FailingBackend(WrappedBackend):
    """The pass with this number fails once, after it has written its K/V."""

    def __init__(self, inner: Backend, failing: int, error: type[BaseException]) -> None:
        super().__init__(inner)
        self._left = failing
        self._error = error

    def submit(self, pass_: Pass) -> Ticket:
        ticket = self.inner.submit(pass_)
        self._left -= 1
        if self._left == 0:
            raise self._error("the device went away")
        return ticket


class Counted(NamedTuple):
    """What is committed of a sample, and how it was counted."""

    digest: str
    num_tokens: int
    stats: SequenceStats


def run_with_a_failure(failing: int, error: type[BaseException]) -> tuple[dict[object, Counted], int]:
    """By sample; and how often a step failed."""
    backend = FailingBackend(FakeBackend(vocab_size=VOCAB_SIZE), failing, error)
    drafters = {"decode": DecodeDrafter(DecodeConfig(window_len=5)), "none": NoDrafter()}
    engine = keep_apart(Engine(backend, family=FAMILY, drafters=drafters))
    for i in range(4):
        params = replace(SAMPLED, max_tokens=11, seed=i, n=1 + i % 2, deterministic=i != 2)
        engine.add(Request((0, 1, i), params, speculation=Speculation("none") if i == 3 else None))
    found, num_failed = {}, 0
    while engine.has_work:
        try:
            events = engine.step()
        except error:
            num_failed += 1
            events = []
        engine.check()
        for event in events:
            if event.output is not None:
                output = event.output
                counted = Counted(output.digest, len(output.token_ids), output.stats)
                found[event.request_id, event.sample_index] = counted
    return found, num_failed


@pytest.mark.slow
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_pass_that_fails_inside_a_window_changes_nothing(error: type[BaseException]) -> None:
    """Each pass fails once in turn. A window whose pass failed is dropped; no token is committed or counted twice.

    Every canonical pass gives what it accepts and a token more, every fast row of a window one drafted token.
    """
    expected, num_failed = run_with_a_failure(10**6, error)
    assert num_failed == 0
    assert sum(counted.stats.mismatches for counted in expected.values()) > 0
    num_passes = num_lost = 0
    while True:
        num_passes += 1
        found, num_failed = run_with_a_failure(num_passes, error)
        assert found.keys() == expected.keys()
        for at, (digest, num_tokens, stats) in found.items():
            request_id = at[0]
            if request_id == 2:  # without determinism: its tokens depend on who runs beside it
                assert (num_tokens, stats.passes, stats.fast_passes) == (11, 1, 10)
                continue
            assert digest == expected[at].digest
            assert num_tokens == stats.accepted + stats.passes
            assert stats.fast_passes == stats.drafted
            lost = stats.drafted - stats.accepted - stats.recomputed
            assert 0 <= lost <= 5 * num_failed, "one failure loses a window of each sequence at most"
            num_lost += lost
        if not num_failed:
            break
    assert num_passes > 25
    assert num_lost > 10


class TimedBackend(WrappedBackend):
    """A canonical pass takes 10 seconds, a fast one 1."""

    now = 100.0

    def submit(self, pass_: Pass) -> Ticket:
        return TimedTicket(self, self.inner.submit(pass_), 10.0 if pass_.kind is PassKind.CANONICAL else 1.0)


@dataclass
class TimedTicket:
    """Time passes where the host waits."""

    backend: TimedBackend
    inner: Ticket
    seconds: float

    def result(self) -> PassResult:
        self.backend.now += self.seconds
        return self.inner.result()


def timed_engine(window_len: int, family: tuple[int, ...]) -> Engine:
    backend = TimedBackend(AgreeingFastPasses(FakeBackend(vocab_size=VOCAB_SIZE)))
    drafters = {"decode": DecodeDrafter(DecodeConfig(window_len=window_len))}
    return keep_apart(Engine(backend, family=family, drafters=drafters, clock=lambda: backend.now))


def test_the_gap_between_commits_is_a_window_and_its_replay() -> None:
    """A window of 4 takes 4 + 10 s and gives 5 tokens, one of 3 takes 3 + 10 s and gives 4."""
    engine = timed_engine(4, (8,))
    engine.add(Request(PROMPT, replace(SAMPLED, max_tokens=10)))
    (output,) = collect(engine).values()
    stats = output.stats
    assert counts(stats) == (2, 0, 0)
    assert (stats.arrival_time, stats.first_token_time, stats.gaps) == (100.0, 110.0, [14.0, 13.0])
    assert engine.totals.longest_gap == stats.longest_gap == 14.0


def test_the_totals_know_the_gap_before_the_last_commit() -> None:
    engine = timed_engine(4, (8,))
    engine.add(Request(PROMPT, replace(SAMPLED, max_tokens=6)))
    (output,) = collect(engine).values()
    assert output.stats.gaps == [14.0]
    assert engine.totals.longest_gap == 14.0


def test_a_replay_stalls_those_that_run_in_fast_passes() -> None:
    """Windows of 4 tokens with their bonus rows: 5 + 5 of 10 rows, then alone. Each replay takes 10 s."""
    engine = timed_engine(4, (16,))
    first = engine.add(Request(PROMPT, replace(SAMPLED, max_tokens=6)))
    second = engine.add(Request((0, 1, 3), replace(SAMPLED, max_tokens=11)))
    fast = engine.add(Request((1, 0, 2), replace(SAMPLED, max_tokens=30, deterministic=False)))
    outputs = collect(engine)
    assert [outputs[i, 0].stats.replays for i in (first, second)] == [1, 2]
    assert [outputs[i, 0].stats.stall_caused for i in (first, second, fast)] == [5.0, 15.0, 0.0]
    assert [outputs[i, 0].stats.longest_stall for i in (first, second, fast)] == [0.0, 0.0, 10.0]
    assert (engine.totals.longest_stall, engine.totals.stall_caused) == (10.0, 20.0)


def test_prompts_and_plain_decoding_stall_nobody() -> None:
    engine = timed_engine(4, (16,))
    fast = engine.add(Request((1, 0, 2), replace(SAMPLED, max_tokens=8, deterministic=False)))
    engine.step()
    engine.add(Request(PROMPT, replace(SAMPLED, max_tokens=1)))
    outputs = collect(engine)
    assert outputs[fast, 0].stats.longest_stall == engine.totals.stall_caused == 0.0


# Real arithmetic: the numpy backend, whose fast passes round activations to bf16.

TINY = TinyConfig(num_layers=3, vocab_size=256, context_len=100, seed=11)
TINY_SLOTS, TINY_PROMPTS = 8000, 96


@pytest.fixture(scope="module")
def tensors() -> dict[str, np.ndarray]:
    made = {name: np.array(values) for name, values in make_tensors(TINY).items()}
    return made | {"head": made["head"] * np.float32(3)}


def tiny_backend(tensors: dict[str, np.ndarray]) -> NumpyBackend:
    model = LoadedModel(TINY.architecture, tensors.__getitem__)
    return NumpyBackend([model], NumpyOptions(num_slots=TINY_SLOTS, num_seq_rows=32, threads=1))


def tiny_prompts() -> list[tuple[int, ...]]:
    drawn = np.random.default_rng(2).integers(0, TINY.vocab_size, (TINY_PROMPTS, 12))
    return [tuple(row) for row in drawn.tolist()]


def run_tiny(backend: Backend, family: tuple[int, ...], drafter: str) -> tuple[Engine, list[SampleOutput]]:
    engine = Engine(
        backend,
        family=family,
        drafters=make_drafters(DraftSetup(draft_len=16)),
        config=EngineConfig(num_slots=TINY_SLOTS),
    )
    for i, prompt in enumerate(tiny_prompts()):
        params = SamplingParams(max_tokens=64, seed=i, temperature=(0.0, 0.8, 1.2)[i % 3], logprobs=i % 3)
        engine.add(Request(prompt, params, speculation=Speculation(drafter)))
    return engine, [output for _, output in sorted(collect(engine).items())]


def cached_kv(engine: Engine, backend: NumpyBackend, output: SampleOutput, prompt: tuple[int, ...]) -> bytes:
    """K and V of all positions but the last token's, which has none."""
    token_ids = (*prompt, *output.token_ids)
    slots = engine._cache.match(token_ids, limit=len(token_ids) - 1).slots
    assert len(slots) == len(token_ids) - 1
    return b"".join(part.tobytes() for part in backend.kv(0, np.array(slots)))


@pytest.mark.slow
def test_real_rounding_is_found_and_rolled_back(tensors: dict[str, np.ndarray]) -> None:
    """Tokens, log-probabilities and the K/V of every committed position are those of drafter `none`, to the bit."""
    plain, rounding = tiny_backend(tensors), tiny_backend(tensors)
    family = audit(plain.probes(), shapes=(1, 4, 8, 16, 64)).choose()
    plain_engine, expected = run_tiny(plain, family, "none")
    engine, found = run_tiny(Bf16FastPasses(rounding), family, "decode")
    assert [(o.digest, o.logprobs) for o in found] == [(o.digest, o.logprobs) for o in expected]
    assert engine.totals.mismatches > 20
    assert engine.totals.recomputed > 150
    for prompt, output, truth in zip(tiny_prompts(), found, expected, strict=True):
        assert cached_kv(engine, rounding, output, prompt) == cached_kv(plain_engine, plain, truth, prompt)


@pytest.mark.slow
def test_control_without_rounding_there_is_next_to_nothing_to_find(tensors: dict[str, np.ndarray]) -> None:
    backend = tiny_backend(tensors)
    engine, _ = run_tiny(backend, audit(backend.probes(), shapes=(1, 4, 8, 16, 64)).choose(), "decode")
    assert engine.totals.replays > 100
    assert engine.totals.mismatches < 5


def test_faults_come_at_their_rate_and_again_at_the_same_places() -> None:
    places = [(t, seq_row) for t in range(200) for seq_row in range(1, 11)]
    given = [[AtRate(0.3, vocab_size=VOCAB_SIZE, seed=seed)(*at, 5) for at in places] for seed in (1, 1, 2)]
    assert given[0] == given[1] != given[2]
    assert 500 < sum(token_id != 5 for token_id in given[0]) < 700
    assert set(given[0]) == set(range(VOCAB_SIZE))
    thrice = faults({7: 2, 9: None})
    assert [[thrice(t, 1, 3) for t in (7, 8, 9)] for _ in range(3)] == [[4, 3, 4], [4, 3, 4], [3, 3, 4]]
    assert thrice.made == {7: 2, 9: 3}


def test_bf16_rounds_to_nearest_even() -> None:
    x = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-9, 3e38, np.inf, np.nan], np.float32)
    wanted = np.array([1.0, 1.0, 1 + 2**-6, 1 + 2**-7, -1.0, 3.00405527e38, np.inf, np.nan], np.float32)
    np.testing.assert_allclose(bf16(x), wanted, rtol=1e-7)
    assert not (bf16(x)[:6].view(np.uint32) & 0xFFFF).any()
