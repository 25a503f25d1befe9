"""The scheduler, case by case: names give the pitfall (S), the rule (R) or the invariant they stand for."""

import contextlib
import itertools
import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.support.adversaries import (
    DRAFTER_NAMES,
    FAMILY,
    MAX_DRAFT,
    MAX_LEN,
    SAMPLED,
    VOCAB_SIZE,
    Bench,
    FinishFails,
    LetterText,
    PushFails,
    alone,
    collect,
    facts,
    keep_apart,
)
from tests.support.fake_backend import FakeBackend
from verispec.backends.protocol import PassKind
from verispec.config import EngineConfig
from verispec.engine import Engine, Request
from verispec.engine.sequence import NO_DRAW
from verispec.errors import InputError, QueueFullError
from verispec.spec.none import NoDrafter
from verispec.types import FinishReason, SamplingParams


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("drafter", DRAFTER_NAMES)
@pytest.mark.parametrize("deterministic", [True, False])
def test_r2_no_drafter_changes_or_breaks_anything(drafter: str, deterministic: bool) -> None:
    bench = Bench()
    bench.add((0, 1, 0, 1), replace(SAMPLED, max_tokens=12, deterministic=deterministic), drafter)
    neighbour = bench.add((0, 2), drafter="none")
    outputs = bench.finish()
    assert len(outputs[0].token_ids) == 12
    assert outputs[neighbour].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("drafter", ["none", "perfect", "random tree", "too many nodes", "promises too much"])
@pytest.mark.parametrize("k", range(MAX_DRAFT + 3))
def test_s5_up_to_the_context_limit_minus_k(k: int, drafter: str) -> None:
    bench = Bench()
    prompt = (0, 1) * MAX_LEN
    bench.add(prompt[: MAX_LEN - 1 - k], replace(SAMPLED, max_tokens=None), drafter)
    bench.add(prompt[: MAX_LEN - 1 - k], replace(SAMPLED, max_tokens=k + 1), drafter)
    bench.add(prompt[: MAX_LEN - 2 * k - 3], replace(SAMPLED, max_tokens=k + 3), drafter)
    outputs = bench.finish()
    assert [len(o.token_ids) for _, o in sorted(outputs.items())] == [k + 1, k + 1, k + 3]
    assert {o.finish_reason for o in outputs.values()} == {FinishReason.LENGTH}


def test_s5_a_prompt_without_room_for_a_token_is_refused_unless_it_is_only_scored() -> None:
    bench = Bench()
    with pytest.raises(InputError, match="at most 31 fit"):
        bench.add((0,) * MAX_LEN)
    bench.add((0,) * MAX_LEN, SamplingParams(max_tokens=0, prompt_logprobs=1))
    assert len(bench.finish()[0].prompt_logprobs) == MAX_LEN - 1


@pytest.mark.parametrize("drafter", ["none", "perfect"])
def test_s2_an_accepted_run_that_passes_a_stop_ends_there_and_caches_nothing_behind_it(drafter: str) -> None:
    (full,) = alone(Request((0, 1, 0), SAMPLED), max_len=MAX_LEN)
    bench = Bench()
    bench.add((0, 1, 0), SAMPLED, drafter)
    bench.expected[1] = bench.expected[0]
    stop_id = full.token_ids[1]
    bench.add((0, 1, 0), replace(SAMPLED, stop_ids=(stop_id,)), drafter)
    output = bench.finish()[1]
    assert output.finish_reason is FinishReason.STOP
    assert output.token_ids == full.token_ids[: full.token_ids.index(stop_id) + 1]


def test_s6_abort_while_waiting() -> None:
    bench = Bench(max_running=1)
    first, second = bench.add((0, 1)), bench.add((0, 2))
    bench.step()
    assert bench.engine.abort(second)
    assert bench.step() == {first: 1, second: 0}
    outputs = bench.finish()
    assert list(outputs) == [first]
    assert not bench.engine.abort(second)


@pytest.mark.parametrize("num_tokens", range(1, 8))
def test_s6_abort_before_any_token_up_to_the_last(num_tokens: int) -> None:
    bench = Bench()
    aborted, other = bench.add((0, 1)), bench.add((0, 2))
    for _ in range(num_tokens):
        bench.step()
    assert bench.engine.abort(aborted)
    bench.engine.check()
    (event, *_) = bench.engine.step()
    assert event.output.finish_reason is FinishReason.ABORT
    assert event.output.token_ids == alone(bench.requests[aborted], max_len=MAX_LEN)[0].token_ids[:num_tokens]
    assert bench.finish().keys() <= {other}


def test_s6_abort_after_the_last_token_is_too_late() -> None:
    bench = Bench()
    request_id = bench.add((0, 1), replace(SAMPLED, max_tokens=1))
    assert bench.step() == {request_id: 1}
    assert not bench.engine.abort(request_id)
    assert not bench.engine.has_work


def test_s6_abort_ends_all_samples() -> None:
    bench = Bench()
    request_id = bench.add((0, 1), replace(SAMPLED, n=3))
    bench.step()
    bench.engine.abort(request_id)
    assert {e.sample_index: e.finish_reason for e in bench.engine.step()} == dict.fromkeys(range(3), FinishReason.ABORT)
    assert not bench.engine.has_work


@pytest.mark.parametrize("change", ["abort", "preempt", "preempt and plan again", "plan again"])
def test_s23_a_stale_result_is_a_no_op(change: str) -> None:
    bench = Bench()
    params = replace(SAMPLED, max_tokens=20)
    stale_id, other_id = bench.add((0, 1), params, "perfect"), bench.add((0, 2), params, "perfect")
    bench.step()
    stale = bench.engine._live[stale_id][0]
    commit = bench.launch()
    before = list(stale.token_ids)
    if change == "abort":
        assert bench.engine.abort(stale_id)
    elif change.startswith("preempt"):
        bench.engine._roster.preempt(stale)
    if change.endswith("plan again"):
        bench.engine._abandon()
        bench.engine._scheduler.plan()
    told = [event.request_id for event in commit() if event.finish_reason is None]
    assert told == ([] if change.endswith("plan again") else [other_id])
    assert stale.token_ids == before
    bench.engine.check()
    assert not any(lease.slots for lease in bench.engine._pool.leases) or change.endswith("plan again")
    if change.endswith("plan again"):  # and never submitted
        bench.engine._abandon()
    if change != "abort":
        bench.finish()


def test_s14_slots_for_every_row_are_leased_before_launch() -> None:
    bench = Bench()
    for i in range(3):
        bench.add((0, i), drafter="perfect")
    bench.step()
    turns = bench.engine._scheduler.plan().turns
    assert sum(t.choice.num_nodes for t in turns) > 0
    for t in turns:
        assert len(t.slots) == t.num_pending + t.choice.num_nodes
        assert t.choice.num_nodes <= MAX_DRAFT
    slots = [s for t in turns for s in t.slots]
    assert len(set(slots)) == len(slots)
    assert bench.engine._pool.owns(slots)


def test_s14_a_draft_that_does_not_fit_is_not_granted_in_part() -> None:
    bench = Bench(num_slots=6, max_len=6, prefix_cache=False)
    bench.add((0, 1, 0, 1), replace(SAMPLED, max_tokens=2), drafter="perfect")
    bench.step()
    assert [t.choice.num_nodes for t in bench.engine._scheduler.plan().turns] in ([], [0])
    bench.finish()


@pytest.mark.parametrize(
    ("sizes", "prompt", "reason"),
    [({"row_budget": 8}, (0, 2), "no rows were left for a draft"),
     ({"row_budget": 16, "num_slots": 18, "max_len": 18}, (0, 2, 0, 2, 0), "no slots are free for a draft")],
)  # fmt: skip
def test_where_only_one_can_draft_it_is_the_oldest(sizes: dict[str, int], prompt: tuple[int, ...], reason: str) -> None:
    """The younger one's prompt is complete in the same step; that it needs more than a row puts it first nowhere."""
    bench, params = Bench(prefix_cache=False, **sizes), replace(SAMPLED, max_tokens=12, logprobs=None)
    bench.add((0, 1), params, "perfect")
    bench.step()
    bench.add(prompt, params, "perfect")
    turns = bench.engine._scheduler.plan().turns
    found = [(t.sequence.sequence_id, t.num_pending, t.choice.num_nodes, t.choice.reason) for t in turns]
    assert found == [(0, 1, MAX_DRAFT, ""), (1, len(prompt), 0, reason)]
    bench.engine._abandon()
    assert len(bench.finish()) == 2


def test_s18_different_accept_lengths_in_one_batch() -> None:
    bench = Bench(row_budget=16)
    params = replace(SAMPLED, max_tokens=20)
    for drafter in ("none", "wrong", "every second", "perfect"):
        bench.add((0, 1), params, drafter)
    bench.step()
    assert list(bench.step().values()) == [1, 1, 2, 5]
    bench.finish()


def test_s19_rollback_after_rollback_holds_nothing() -> None:
    bench = Bench(prefix_cache=False)
    bench.add((0, 1), replace(SAMPLED, max_tokens=20), drafter="wrong")
    for num_steps in range(1, 20):
        bench.step()
        assert bench.engine._pool.num_free == 256 - 1 - num_steps
    output = bench.finish()[0]
    assert (output.stats.accepted, output.stats.passes) == (0, 20)
    assert output.stats.drafted > 50


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_s20_nothing_of_the_last_owner_survives(prefix_cache: bool) -> None:
    bench = Bench(num_slots=MAX_LEN, max_running=1, prefix_cache=prefix_cache)
    for prompt in itertools.product(range(3), repeat=3):
        bench.add(prompt, replace(SAMPLED, repetition_penalty=1.2), drafter="binary tree")
    assert len(bench.finish()) == 27
    assert {r for p in bench.backend.passes for r in p.rows.seq_rows.tolist()} == {0, 1}


@pytest.mark.parametrize("num_slots", [MAX_LEN, MAX_LEN + 5, 3 * MAX_LEN])
def test_s26_everything_ends_within_the_computed_number_of_steps(num_slots: int) -> None:
    bench = Bench(num_slots=num_slots, row_budget=4)
    for i in range(6):
        bench.add((0,) * (3 + 2 * i), replace(SAMPLED, max_tokens=None, n=1 + i % 2), "wrong")
    for _ in range(sum(s.max_len - 1 for samples in bench.engine._live.values() for s in samples)):
        bench.step()
    assert not bench.engine.has_work


def test_s27_after_a_soak_nothing_is_held() -> None:
    bench = Bench(num_slots=MAX_LEN + 8, row_budget=8)
    for i in range(40):
        bench.add((0, i % 3, i % 2) * (1 + i % 3), replace(SAMPLED, n=1 + i % 3), DRAFTER_NAMES[i % len(DRAFTER_NAMES)])
        bench.step()
        if i % 5 == 4:
            bench.engine.abort(i - 2)
    bench.finish()
    pool, roster = bench.engine._pool, bench.engine._roster
    assert pool.leases == ()
    assert bench.engine.num_free_slots == pool.num_slots
    bench.engine._cache.evict(pool.num_slots)
    assert pool.num_free == pool.num_slots
    assert sorted(roster.free_seq_rows) == list(range(1, 9))
    assert not bench.engine._drafters._drafters["suffix"]._own


def test_the_queue_is_bounded() -> None:
    bench = Bench(max_waiting=2, max_running=1)
    bench.add((0, 1), replace(SAMPLED, max_tokens=1))
    bench.add((0, 2))
    with pytest.raises(QueueFullError, match="2 of 2"):
        bench.add((0, 0))
    with pytest.raises(InputError, match="n = 3"):
        bench.add((0, 0), replace(SAMPLED, n=3))
    bench.step()
    bench.add((0, 0))
    assert len(bench.finish()) == 2


@pytest.mark.parametrize("max_running", [1, 2, 16])
def test_samples_share_their_prompt(max_running: int) -> None:
    bench = Bench(max_running=max_running)
    prompt = (0, 1, 2, 0, 1, 1, 2, 0, 0, 1)
    bench.add(prompt, replace(SAMPLED, n=3), drafter="perfect")
    bench.finish()
    positions = [p for pass_ in bench.backend.passes for p in pass_.rows.positions[pass_.rows.seq_rows > 0].tolist()]
    counts = [positions.count(i) for i in range(len(prompt))]
    assert counts == [1] * (len(prompt) - 1) + [3], "the last token runs in every sample, because it draws"


def test_a_long_prompt_is_chunked_and_the_others_go_on() -> None:
    bench = Bench(row_budget=8)
    decoding = bench.add((0, 1), replace(SAMPLED, max_tokens=20))
    bench.step()
    chunked = bench.add((2, 1, 0) * 8, replace(SAMPLED, max_tokens=2))
    bench.backend.passes.clear()
    steps = [bench.step() for _ in range(5)]
    assert steps == [{decoding: 1}] * 3 + [{decoding: 1, chunked: 1}] * 2
    assert bench.real_rows(PassKind.CANONICAL) == [8, 8, 8, 4, 2], "7 + 7 + 7 + 3 rows of 24 prompt tokens"
    bench.finish()


def test_prompts_share_the_rows_one_after_another() -> None:
    """Three prompts of 8 tokens, 8 rows: each is computed in one pass, while the younger ones have no row at all."""
    bench = Bench(row_budget=8, max_running=4)
    first = bench.add((0, 1), replace(SAMPLED, max_tokens=20))
    bench.step()
    others = [bench.add((2, 1, 0, i) * 2, replace(SAMPLED, max_tokens=9)) for i in range(3)]
    assert [sorted(bench.step()) for _ in range(4)] == [
        [first],  # 7 rows of the first prompt
        [first, others[0]],  # its last one, and 6 of the second
        [first, others[0], others[1]],
        [first, others[0], others[1], others[2]],
    ]
    bench.finish()


def test_first_come_first_served_and_the_youngest_is_preempted() -> None:
    bench = Bench(num_slots=40, row_budget=16, prefix_cache=False)
    for i in range(3):
        bench.add((i,) * 8, replace(SAMPLED, max_tokens=20))
    order: list[int] = []
    while bench.engine.has_work:
        order += [e.request_id for e in bench.engine.step() if e.output is not None]
        bench.engine.check()
    assert order == [0, 1, 2]
    bench = Bench(num_slots=40, row_budget=16, prefix_cache=False)
    for i in range(3):
        bench.add((i,) * 8, replace(SAMPLED, max_tokens=20))
    preemptions = [output.stats.preemptions for output in bench.finish().values()]
    assert preemptions[0] == 0
    assert 1 <= preemptions[1] <= preemptions[2]


def test_times_are_those_of_the_injected_clock() -> None:
    now = 1.0
    bench = Bench(clock=lambda: now)
    bench.add((0, 1), replace(SAMPLED, max_tokens=4))
    for now in (3.0, 4.5, 4.75, 10.0):  # noqa: B007 the clock reads it
        (event,) = bench.engine.step()
    stats = event.output.stats
    assert (stats.arrival_time, stats.time_to_first_token, stats.finish_time) == (1.0, 2.0, 10.0)
    assert stats.gaps == [1.5, 0.25, 5.25]


def test_invariant_3_each_kind_of_request_runs_in_its_passes() -> None:
    bench = Bench(row_budget=16)
    for i in range(5):
        bench.add((0, 1, i), replace(SAMPLED, deterministic=i < 3))
    bench.finish()
    assert bench.real_rows(PassKind.CANONICAL) == [15] + [3] * 7, "all prompts, then the deterministic ones"
    assert bench.real_rows(PassKind.FAST) == [2] * 7
    for pass_ in bench.backend.passes:
        shapes = {len(pass_.rows), pass_.head_shape}
        assert shapes <= set(FAMILY) if pass_.kind is PassKind.CANONICAL else shapes == {2}


@pytest.mark.parametrize("text", [PushFails, FinishFails])
@pytest.mark.parametrize("drafter", ["none", "perfect"])
def test_invariant_6_a_text_that_fails_ends_its_request_alone(text: type[LetterText], drafter: str) -> None:
    bench = Bench()
    failing, other = bench.add((0, 1), drafter=drafter, text=text), bench.add((0, 2), drafter=drafter, text=LetterText)
    outputs = bench.finish()
    assert (outputs[failing].finish_reason, outputs[other].finish_reason) == (FinishReason.ERROR, FinishReason.LENGTH)
    assert outputs[failing].error.startswith("UnicodeError")
    assert len(outputs[failing].token_ids) == (3 if text is PushFails else 8)


def test_invariant_6_a_text_that_fails_to_end_can_be_aborted() -> None:
    bench = Bench()
    request_id = bench.add((0, 1), replace(SAMPLED, n=2), text=FinishFails)
    bench.step()
    bench.engine.abort(request_id)
    assert {e.sample_index for e in bench.engine.step() if e.output is not None} == {0, 1}
    assert not bench.engine.has_work


def test_invariant_6_a_text_that_cannot_begin_leaves_nothing_behind() -> None:
    begin = iter((LetterText(),))
    bench = Bench()
    with pytest.raises(StopIteration):
        bench.engine.add(Request((0, 1), replace(SAMPLED, n=2), text=lambda: next(begin)))
    assert (bench.engine.num_waiting, bench.engine.has_work) == (0, False)
    bench.add((0, 2))
    assert len(bench.finish()) == 1


@pytest.mark.parametrize("drafter", ["none", "perfect", "star"])
def test_invariant_6_nan_ends_its_request_alone_and_is_not_cached(drafter: str) -> None:
    bench = Bench(nan_token=5)
    never_5 = replace(SAMPLED, logit_bias={5: -1e4})
    at_once, other = bench.add((0, 1, 5), drafter=drafter), bench.add((0, 2), never_5, drafter)
    outputs = bench.finish()
    assert (outputs[at_once].finish_reason, outputs[at_once].token_ids) == (FinishReason.ERROR, ())
    assert outputs[at_once].error == NO_DRAW
    assert outputs[other].error is None
    hit = bench.engine._cache.match((0, 1, 5), limit=3)
    assert len(hit.slots) <= 1, "the failed request published nothing"


@pytest.mark.parametrize("eos_id", [VOCAB_SIZE, 10**6, -1])
def test_r2_an_eos_outside_the_vocabulary_harms_nobody(eos_id: int) -> None:
    bench = Bench()
    other = bench.add((0, 2))
    often_7 = Request((0, 1), replace(SAMPLED, logit_bias={VOCAB_SIZE - 1: 100.0}))
    with contextlib.suppress(InputError):  # refused or ignored: both are right
        bench.engine.add(replace(often_7, params=replace(often_7.params, min_tokens=3), eos_ids=(eos_id,)))
    outputs = collect(bench.engine)
    truths = (bench.requests[other], often_7)
    for (request_id, _), output in outputs.items():
        assert facts(output) == facts(alone(truths[request_id], max_len=MAX_LEN)[0])


@pytest.mark.filterwarnings("default")
def test_s4_a_request_that_bans_every_token_ends_with_an_error() -> None:
    bench = Bench()
    every_id = tuple(range(VOCAB_SIZE))
    for temperature in (0.0, 1.0):
        params = replace(SAMPLED, temperature=temperature, min_tokens=2, stop_ids=every_id)
        bench.engine.add(Request((0, 1), params))
    outputs = collect(bench.engine).values()
    assert [(o.finish_reason, o.token_ids) for o in outputs] == [(FinishReason.ERROR, ())] * 2


@pytest.mark.parametrize("missing", [(), (8,), (1, 2, 4, 8)])
def test_both_kinds_share_passes_where_every_shape_in_use_is_canonical(missing: tuple[int, ...]) -> None:
    """Passes have at most 16 rows: that the family has no larger shape says nothing. Control: smaller ones missing."""
    backend = FakeBackend(vocab_size=VOCAB_SIZE)
    backend.shapes = (1, 2, 4, 8, 16, 32, 64)
    family = tuple(m for m in backend.shapes if m <= 16 and m not in missing)
    config = EngineConfig(num_slots=256, row_budget=16)
    engine = keep_apart(Engine(backend, family=family, drafters={"none": NoDrafter()}, config=config))
    for deterministic in (True, False):
        engine.add(Request([1, 2, 3], SamplingParams(max_tokens=8, deterministic=deterministic)))
    collect(engine)
    kinds = {pass_.kind for pass_ in backend.passes}
    assert kinds == ({PassKind.CANONICAL, PassKind.FAST} if missing else {PassKind.CANONICAL})
    num_shared = sum(len({*pass_.rows.seq_rows.tolist()} - {0}) == 2 for pass_ in backend.passes)
    assert num_shared == (1 if missing else 8), "the prompts' pass, or every one"


def test_a_budget_below_every_canonical_shape_makes_none_of_the_smaller_ones_canonical() -> None:
    backend = FakeBackend(vocab_size=VOCAB_SIZE)
    engine = Engine(
        backend, family=(32, 64), drafters={"none": NoDrafter()}, config=EngineConfig(num_slots=256, row_budget=2)
    )
    engine.add(Request([1, 2, 3], SamplingParams(max_tokens=8, deterministic=False)))
    collect(engine)
    assert PassKind.FAST in {pass_.kind for pass_ in backend.passes}
