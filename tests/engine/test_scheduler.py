"""The scheduler, case by case: names give the pitfall (S), the rule (R) or the invariant they stand for."""

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from tests.support.adversaries import (
    DRAFTER_NAMES,
    FAMILY,
    VOCAB_SIZE,
    FinishFails,
    LetterText,
    PushFails,
    adversaries,
    alone,
    beyond,
    collect,
    facts,
)
from tests.support.fake_backend import FakeBackend

from verispec.backends.protocol import Pass, PassKind, ReadyTicket
from verispec.config import EngineConfig
from verispec.engine import Engine, Request
from verispec.engine.engine import _judge
from verispec.errors import InputError, QueueFullError
from verispec.types import FinishReason, SampleOutput, SamplingParams, TextPiece

MAX_LEN, MAX_DRAFT = 32, 4
SAMPLED = SamplingParams(max_tokens=8, temperature=1.0, seed=5, logprobs=2)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class Bench:
    """An engine on a fake backend that can be stepped by hand, with free slots poisoned after every step."""

    def __init__(
        self,
        *,
        num_slots: int = 256,
        nan_token: int | None = None,
        clock: Callable[[], float] = lambda: 0.0,
        backend: type[FakeBackend] = FakeBackend,
        **options: int,
    ) -> None:
        self.backend = backend(
            vocab_size=VOCAB_SIZE, context_len=MAX_LEN, num_slots=num_slots, max_tail=MAX_DRAFT, nan_token=nan_token
        )
        self.expected: dict[int, tuple[int, ...]] = {}
        self.nan_token = nan_token
        options = {"max_len": MAX_LEN, "max_draft": MAX_DRAFT, **options}
        config = EngineConfig(num_slots=num_slots, **options)
        self.engine = Engine(
            self.backend, family=FAMILY, drafters=adversaries(self.expected), config=config, clock=clock
        )
        self.requests: dict[int, Request] = {}

    def add(self, prompt: tuple[int, ...], params: SamplingParams = SAMPLED, drafter: str = "none", **options) -> int:
        request = Request(prompt, params, drafter=drafter, **options)
        request_id = self.engine.add(request)
        self.requests[request_id] = request
        texts = beyond(request, max_len=MAX_LEN, nan_token=self.nan_token)
        for sequence, text in zip(self.engine._live[request_id], texts, strict=True):
            self.expected[sequence.sequence_id] = text
        return request_id

    def step(self) -> dict[int, int]:
        """One step; how many tokens each request received."""
        events = self.engine.step()
        self.engine.check()
        self.backend.poison(self.engine._pool._free)
        return {event.request_id: len(event.logprobs) for event in events}

    def finish(self) -> dict[int, SampleOutput]:
        """Run to the end, compare every deterministic sample with the oracle, and give sample 0 by request id."""
        outputs = {}
        while self.engine.has_work:
            for event in self.engine.step():
                if event.output is not None:
                    outputs[event.request_id, event.sample_index] = event.output
            self.engine.check()
            self.backend.poison(self.engine._pool._free)
        for (request_id, i), output in outputs.items():
            request = self.requests[request_id]
            if request.params.deterministic and output.finish_reason is not FinishReason.ABORT:
                assert facts(output) == facts(alone(request, max_len=MAX_LEN, nan_token=self.nan_token)[i])
        return {request_id: output for (request_id, i), output in outputs.items() if i == 0}

    def launch(self) -> Callable[[], list]:
        """A step up to its commit; the rest is returned."""
        plan = self.engine._scheduler.plan()
        drafts = self.engine._drafters.advance(plan)
        scores = self.engine._verifier.run(plan, drafts)
        return lambda: self.engine._scheduler.commit(plan, drafts, scores, _judge(plan, drafts, scores))

    def real_rows(self, kind: PassKind) -> list[int]:
        """Rows of each pass of a kind, padding not counted."""
        return [int((p.rows.seq_rows > 0).sum()) for p in self.backend.passes if p.kind is kind]


@pytest.mark.parametrize("drafter", DRAFTER_NAMES)
@pytest.mark.parametrize("deterministic", [True, False])
def test_r2_no_drafter_changes_or_breaks_anything(drafter: str, deterministic: bool) -> None:
    bench = Bench()
    bench.add((0, 1, 0, 1), replace(SAMPLED, max_tokens=12, deterministic=deterministic), drafter)
    neighbour = bench.add((0, 2), drafter="none")
    outputs = bench.finish()
    assert len(outputs[0].token_ids) == 12
    assert outputs[neighbour].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("drafter", ["none", "perfect", "random tree", "too many nodes", "offers too much"])
@pytest.mark.parametrize("k", range(MAX_DRAFT + 3))
def test_s5_up_to_the_context_limit_minus_k(k: int, drafter: str) -> None:
    bench = Bench()
    prompt = (0, 1) * MAX_LEN
    bench.add(prompt[: MAX_LEN - 1 - k], replace(SAMPLED, max_tokens=None), drafter)
    bench.add(prompt[: MAX_LEN - 1 - k], replace(SAMPLED, max_tokens=k + 1), drafter)
    bench.add(prompt[: MAX_LEN - 2 * k - 3], replace(SAMPLED, max_tokens=k + 3), drafter)
    outputs = bench.finish()
    assert [len(o.token_ids) for o in outputs.values()] == [k + 1, k + 1, k + 3]
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
    stale_id, other_id = bench.add((0, 1), drafter="perfect"), bench.add((0, 2), drafter="perfect")
    bench.step()
    stale, other = (bench.engine._live[i][0] for i in (stale_id, other_id))
    commit = bench.launch()
    before = list(stale.token_ids)
    if change == "abort":
        assert bench.engine.abort(stale_id)
    elif change.startswith("preempt"):
        bench.engine._scheduler._preempt(stale)
    if change.endswith("plan again"):
        bench.engine._scheduler.plan()
    assert commit() == ([] if change.endswith("plan again") else [other])
    assert stale.token_ids == before
    bench.engine.check()
    assert not bench.engine._pool.leases or change.endswith("plan again")
    if change != "abort":
        bench.finish()


class FailingOnce(FakeBackend):
    """Its third pass raises after it has written."""

    def submit(self, pass_: Pass) -> ReadyTicket:
        ticket = super().submit(pass_)
        if len(self.passes) == 3:
            raise RuntimeError("the device is busy")
        return ticket


def test_s23_a_pass_that_failed_is_planned_again() -> None:
    bench = Bench(backend=FailingOnce)
    bench.add((0, 1), drafter="random tree")
    bench.add((0, 2), drafter="perfect")
    bench.step()
    with pytest.raises(RuntimeError):
        for _ in range(3):
            bench.step()
    bench.engine.check()
    assert len(bench.finish()) == 2


def test_s14_slots_for_every_row_are_leased_before_launch() -> None:
    bench = Bench()
    for i in range(3):
        bench.add((0, i), drafter="perfect")
    bench.step()
    plan = bench.engine._scheduler.plan()
    assert sum(p.draft_quota for p in plan.sequences) > 0
    for p in plan.sequences:
        assert len(p.lease.slots) == p.num_pending + p.draft_quota
        assert p.draft_quota <= MAX_DRAFT
    slots = [s for p in plan.sequences for s in p.lease.slots]
    assert len(set(slots)) == len(slots)
    assert all(bench.engine._pool.refs(s) == 1 for s in slots)


def test_s14_a_draft_that_does_not_fit_is_not_granted_in_part() -> None:
    bench = Bench(num_slots=6, max_len=6, prefix_cache=False)
    bench.add((0, 1, 0, 1), replace(SAMPLED, max_tokens=2), drafter="perfect")
    bench.step()
    assert [p.draft_quota for p in bench.engine._scheduler.plan().sequences] in ([], [0])
    bench.finish()


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
    pool, scheduler = bench.engine._pool, bench.engine._scheduler
    assert pool.leases == ()
    assert pool.num_free + pool.num_evictable == pool.num_slots
    assert bench.engine._cache.evict(pool.num_slots) == pool.num_slots - pool.num_free or pool.num_evictable == 0
    assert pool.num_free == pool.num_slots
    assert sorted(scheduler._free_seq_rows) == list(range(1, 9))
    assert not bench.engine._drafters._drafters["ngram"]._indices
