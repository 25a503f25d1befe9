"""The checks of regular decoding can fail: each way to break it on purpose is caught by one check, written once.

A sabotage replaces one function of the engine, of `spec/` or of `sampling/` for one test. The check compares with the
oracle, looks at K/V, passes and books after every step, and counts replays and mismatches that were worked out by hand.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.support.adversaries import VOCAB_SIZE
from tests.support.decoding import PROMPT, SAMPLED, Watched, letters, oracle
from tests.support.faulty_backends import AtPositions
from verispec.backends.protocol import PassKind
from verispec.engine import Engine, Request
from verispec.engine import judging as judging_module
from verispec.engine import scheduler as scheduler_module
from verispec.engine.judging import judge_plan
from verispec.engine.scheduler import Scheduler
from verispec.engine.sequence import Sequence as EngineSequence
from verispec.engine.window import Window
from verispec.kv import DUMP_SLOT
from verispec.sampling import rows as sampling_rows
from verispec.sampling.rows import SamplingRowsBuilder
from verispec.spec.plan import Plan, SequencePlan, WindowPlan
from verispec.spec.verifier import Score, Scores, Verifier, _PassBuilder
from verispec.text.detokenizer import TextStream
from verispec.types import Draft, FinishReason, TokenEvent, TokenLogprob, Verdict

Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """A sabotage may end requests with errors, which are logged."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


# The check.


def check() -> None:
    """Raise AssertionError unless regular decoding keeps its promise and its books."""
    check_counts()
    check_agreement()
    check_stale_results()
    check_a_crowd()


def check_counts() -> None:
    """6 tokens with windows of 4: the k-th is wrong, or none. The last position is decided by a draw or by a row."""
    expected = {1: (2, 1, 4, 7), 2: (2, 1, 3, 6), 3: (2, 1, 2, 5), 4: (1, 1, 1, 4), 99: (1, 0, 0, 4)}
    for k, wanted in expected.items():
        for family in ((4,), (8,)):
            redraw = AtPositions({3 + k: 1}, vocab_size=VOCAB_SIZE)
            watched = Watched(4, agreeing=True, redraw=redraw, family=family)
            watched.ask(params=replace(SAMPLED, max_tokens=6))
            stats = watched.finish(100)[0].stats
            found = (stats.replays, stats.mismatches, stats.recomputed, stats.drafted)
            assert found == wanted, "counts of one mismatch"
    watched = Watched(8, agreeing=True, family=(2, 4))
    watched.ask((0, 1), replace(SAMPLED, max_tokens=40))
    stats = watched.finish(200)[0].stats
    assert stats.drafted == stats.accepted == stats.fast_passes, "a cut window goes on"


def check_agreement() -> None:
    """Where fast passes give canonical bits nothing mismatches, whatever the sampling parameters."""
    watched = Watched(6, agreeing=True)
    for i in range(4):
        params = replace(
            SAMPLED, max_tokens=24, min_tokens=10 * (i % 2), stop_ids=(7,), seed=i, repetition_penalty=1.2 + i,
            presence_penalty=0.5, frequency_penalty=0.7,
        )  # fmt: skip
        watched.ask((0, 1, i), params, text=letters())
    outputs = watched.finish(300)
    assert watched.totals.replays > 5
    assert watched.totals.mismatches == 0, "fast passes agree, and yet a replay found another token"
    assert all(o.stats.drafted < len(o.token_ids) for o in outputs.values()), "tokens were decoded behind the end"


def check_stale_results() -> None:
    """Results of a plan whose sequence was preempted, aborted or planned again in the meantime change nothing."""
    for num_steps in (0, 3, 5):  # in flight: the prompt, a row of a window, a replay
        for change in ("plan again", "preempt", "abort"):
            watched = Watched(4)
            stale = watched.ask(params=replace(SAMPLED, max_tokens=20))
            for _ in range(num_steps):
                watched.step()
            engine, sequence = watched.engine, watched.sequence(stale)
            plan = engine._scheduler.plan()
            drafts = engine._drafters.advance(plan)
            scores = engine._verifier.run(plan, drafts)
            if change == "preempt":
                engine._scheduler._preempt(sequence)
            elif change == "abort":
                watched.abort(stale)
            else:
                engine._scheduler.plan()
            before = state(sequence)
            engine._scheduler.commit(plan, drafts, scores, judge_plan(plan, drafts, scores)[0])
            assert state(sequence) == before, "a stale result was committed"
            watched.finish(300)


def state(sequence: EngineSequence) -> tuple[object, ...]:
    """What a commit changes."""
    window = sequence.window.token_ids if sequence.window else ()
    return tuple(sequence.token_ids), tuple(window), tuple(sequence.slots), sequence.finish_reason, sequence.epoch


def crowd() -> Iterator[Request]:
    """Requests that end in every way, share prefixes and sample in different ways."""
    long = Request(PROMPT, replace(SAMPLED, max_tokens=16), text=letters())
    tokens = oracle(long)[0].token_ids
    for i in range(3):
        penalties = {"repetition_penalty": 1.5, "presence_penalty": 0.6, "frequency_penalty": 0.5}
        yield replace(long, eos_ids=(tokens[5 + i],))
        yield replace(long, prompt_ids=(*PROMPT, i), params=replace(long.params, temperature=0.0, n=2))
        yield replace(long, params=replace(long.params, seed=i, **penalties))
        yield replace(long, params=replace(long.params, seed=i, min_tokens=4, stop_ids=(0, 3)))
        yield replace(long, text=letters("".join(chr(ord("a") + t) for t in tokens[4 + i : 6 + i])))
        yield replace(long, prompt_ids=(*PROMPT, 3, i), params=replace(long.params, seed=i, deterministic=False))


def check_a_crowd() -> None:
    """Few slots, so that sequences are preempted; some are aborted; the cache is warm in the second half."""
    for settings in ({"num_slots": 120, "apart": True}, {"num_slots": 40, "row_budget": 8}):
        watched = Watched(5, **settings)
        for i, request in enumerate([*crowd(), *crowd()]):
            request_id = watched.add(request)
            watched.step()
            if i % 7 == 6:
                watched.abort(request_id - 2)
        watched.finish(2000)
        assert watched.totals.mismatches > 20
    assert watched.totals.preemptions > 5


def test_the_unsabotaged_engine_passes() -> None:
    check()


# The sabotages.


def replay_writes_to_the_dump_slot(patch: Patch) -> None:
    honest = _PassBuilder._add_chain

    def add_chain(self: _PassBuilder, plan: SequencePlan, draft: Draft) -> None:
        if not plan.window:
            return honest(self, plan, draft)
        start = len(plan.sequence.token_ids)
        self._update_table(plan.seq_row, start, plan.lease.slots[plan.num_pending : plan.num_pending + len(draft)])
        for i, token_id in enumerate(draft.token_ids):
            row = self.rows.add(
                token_id=token_id,
                position=start + i,
                slot=DUMP_SLOT,
                seq_row=plan.seq_row,
                prefix_len=start + i,
                tail=(DUMP_SLOT,),
            )
            self._want_draw(plan.sequence, row, path_ids=draft.token_ids[: i + 1])
        return None

    patch.setattr(_PassBuilder, "_add_chain", add_chain)


def replay_writes_to_each_others_slots(patch: Patch) -> None:
    honest = _PassBuilder._add_chain

    def add_chain(self: _PassBuilder, plan: SequencePlan, draft: Draft) -> None:
        slots = plan.lease.slots
        first, end = plan.num_pending, plan.num_pending + len(draft)
        turned = replace(plan.lease, slots=[*slots[:first], *reversed(slots[first:end]), *slots[end:]])
        honest(self, replace(plan, lease=turned), draft)

    patch.setattr(_PassBuilder, "_add_chain", add_chain)


def _patch_judge(patch: Patch, change: Callable[[Draft, Sequence[int], Verdict], Verdict]) -> None:
    honest = judging_module.judge

    def judge(drafts: Sequence[Draft], draws: Sequence[Any]) -> list[Verdict]:
        return [change(*parts) for parts in zip(drafts, draws, honest(drafts, draws), strict=True)]

    patch.setattr(judging_module, "judge", judge)


def one_token_too_many_is_accepted(patch: Patch) -> None:
    def longer(draft: Draft, draws: Sequence[int], verdict: Verdict) -> Verdict:
        count = len(verdict.path)
        return verdict if count >= len(draft) else Verdict((*verdict.path, count), int(draws[count + 1]))

    _patch_judge(patch, longer)


def _patch_commit(patch: Patch, change: Callable[[SequencePlan, Score, Verdict], Score]) -> None:
    honest = Scheduler._commit_one

    def commit(self: Scheduler, plan: SequencePlan, draft: Draft, score: Score, verdict: Any, **options: Any) -> None:
        changed = change(plan, score, verdict) if plan.window and verdict is not None else score
        honest(self, plan, draft, changed, verdict, **options)

    patch.setattr(Scheduler, "_commit_one", commit)


def the_drafted_token_is_committed_at_a_mismatch(patch: Patch) -> None:
    def with_drafted(plan: SequencePlan, score: Score, verdict: Verdict) -> Score:
        entries, at = list(score.logprobs), len(verdict.path)
        if at < len(plan.window):
            entries[at] = entries[at]._replace(token_id=plan.window[at])
        return replace(score, logprobs=tuple(entries))

    _patch_commit(patch, with_drafted)


def windows_are_committed_unverified(patch: Patch) -> None:
    """The replay's draws are replaced by the window's tokens: whatever was decoded is confirmed."""
    honest = Verifier.run

    def run(self: Verifier, plan: Plan, drafts: Sequence[Draft]) -> Scores:
        scores = honest(self, plan, drafts)
        for p, score in zip(plan.canonical, scores.judged, strict=False):
            count = min(len(p.window), len(score.draws))
            score.draws[:count] = p.window[:count]
        stamped = [
            replace(s, logprobs=tuple(e._replace(token_id=int(t)) for e, t in zip(s.logprobs, s.draws, strict=True)))
            for s in scores.judged
        ]
        return scores._replace(judged=stamped)

    patch.setattr(Verifier, "run", run)


def replays_run_in_fast_passes(patch: Patch) -> None:
    honest = Verifier._run_pass

    def run_pass(self: Verifier, kind: PassKind, plans: Sequence[SequencePlan], *args: Any) -> Any:
        return honest(self, PassKind.FAST if any(p.window for p in plans) else kind, plans, *args)

    patch.setattr(Verifier, "_run_pass", run_pass)


def canonical_passes_run_in_any_shape(patch: Patch) -> None:
    patch.setattr(Verifier, "_canonical_shape", lambda self, num_rows: num_rows)


def the_last_position_is_not_compared(patch: Patch) -> None:
    patch.setattr(Window, "num_confirmed", lambda self, verdict: min(len(verdict.path) + 1, len(self)))


def fast_kv_counts_as_canonical(patch: Patch) -> None:
    honest = Scheduler._commit_slots

    def commit_slots(self: Scheduler, *args: Any, is_canonical: bool) -> None:
        honest(self, *args, is_canonical=True)

    patch.setattr(Scheduler, "_commit_slots", commit_slots)


def windows_are_published(patch: Patch) -> None:
    honest = Scheduler._release

    def release(self: Scheduler, sequence: EngineSequence) -> None:
        if sequence.window and sequence.lease and sequence.canonical_len == sequence.computed_len:
            token_ids = [*sequence.token_ids, *sequence.window.token_ids]
            slots, end = sequence.slots + sequence.lease.slots, len(sequence.slots) + len(sequence.window)
            held = self._cache.publish(token_ids[:end], slots, (end,))
            sequence.slots, sequence.lease.slots = held[: sequence.computed_len], held[sequence.computed_len :]
        honest(self, sequence)

    patch.setattr(Scheduler, "_release", release)


def uncommitted_tokens_are_streamed(patch: Patch) -> None:
    honest = Engine._events

    def events(self: Engine) -> list[TokenEvent]:
        made = honest(self)
        for s in self._scheduler.running:
            if s.window:
                entries = tuple(TokenLogprob(token_id, 0.0) for token_id in s.window.token_ids)
                made.append(TokenEvent(s.request_id, s.sample_key.sample_index, entries))
        return made

    patch.setattr(Engine, "_events", events)


def _shift_noise(patch: Patch) -> None:
    honest = SamplingRowsBuilder.add

    def add(self: SamplingRowsBuilder, *args: Any, t: int, path_ids: Sequence[int], **options: Any) -> None:
        honest(self, *args, t=t - bool(path_ids), path_ids=path_ids, **options)

    patch.setattr(SamplingRowsBuilder, "add", add)


def the_noise_of_drafted_rows_is_off_by_one(patch: Patch) -> None:
    _shift_noise(patch)


def the_noise_of_regular_decoding_is_off_by_one(patch: Patch) -> None:
    """Only hints are wrong: no bit of the output changes, but replays confirm less."""
    honest = _PassBuilder.add_window

    def add_window(self: _PassBuilder, plan: WindowPlan) -> None:
        with pytest.MonkeyPatch.context() as inner:
            _shift_noise(inner)
            honest(self, plan)

    patch.setattr(_PassBuilder, "add_window", add_window)


def penalties_ignore_the_path(patch: Patch) -> None:
    patch.setattr(sampling_rows, "_with_path", lambda base, path_ids: base)


def penalties_ignore_the_path_in_regular_decoding(patch: Patch) -> None:
    """Only hints are wrong here too."""
    honest = _PassBuilder.add_window

    def add_window(self: _PassBuilder, plan: WindowPlan) -> None:
        with pytest.MonkeyPatch.context() as inner:
            penalties_ignore_the_path(inner)
            honest(self, plan)

    patch.setattr(_PassBuilder, "add_window", add_window)


def _patch_replay(patch: Patch, after: Callable[[EngineSequence, Window, Verdict], None]) -> None:
    honest = EngineSequence.note_replay

    def note_replay(self: EngineSequence, window: Window, verdict: Verdict) -> int:
        token_ids = list(window.token_ids)
        confirmed = honest(self, window, verdict)
        after(self, replace(window, token_ids=token_ids), verdict)
        return confirmed

    patch.setattr(EngineSequence, "note_replay", note_replay)


def the_window_survives_a_mismatch(patch: Patch) -> None:
    def keep(sequence: EngineSequence, window: Window, verdict: Verdict) -> None:
        rest = window.token_ids[len(verdict.path) + 1 :]
        if sequence.window is None and rest:
            sequence.window = replace(window, token_ids=rest)

    _patch_replay(patch, keep)


def the_rest_of_a_cut_window_is_lost(patch: Patch) -> None:
    def lose(sequence: EngineSequence, window: Window, verdict: Verdict) -> None:
        sequence.window = None

    _patch_replay(patch, lose)


def the_window_survives_preemption(patch: Patch) -> None:
    honest = Scheduler._preempt

    def preempt(self: Scheduler, sequence: EngineSequence) -> None:
        window = sequence.window
        honest(self, sequence)
        sequence.window = window

    patch.setattr(Scheduler, "_preempt", preempt)


def leases_are_not_trimmed(patch: Patch) -> None:
    patch.setattr(Scheduler, "_trim_lease", lambda self, sequence: None)


def leases_keep_a_slot_too_many(patch: Patch) -> None:
    honest = Scheduler._trim_lease

    def trim(self: Scheduler, sequence: EngineSequence) -> None:
        if sequence.window is None:
            honest(self, sequence)

    patch.setattr(Scheduler, "_trim_lease", trim)


def a_finish_in_the_window_ends_the_sequence(patch: Patch) -> None:
    honest = Scheduler._commit_window

    def commit_window(self: Scheduler, plan: WindowPlan, token_id: int) -> None:
        honest(self, plan, token_id)
        sequence = plan.sequence
        assert isinstance(sequence, EngineSequence)
        if token_id in sequence.stopping_ids and sequence.window is not None and sequence.window.is_over:
            sequence.finish(FinishReason.STOP)
            self.changed[sequence.sequence_id] = sequence
            self._release(sequence)

    patch.setattr(Scheduler, "_commit_window", commit_window)


def a_finish_in_the_window_is_overlooked(patch: Patch) -> None:
    """No bit of the output changes, but tokens are decoded that can never be committed."""
    honest = Window.push

    def push(self: Window, token_id: int, *, is_last: bool, **options: Any) -> None:
        honest(self, token_id, stopping_ids=(), may_stop=False, is_last=is_last)

    patch.setattr(Window, "push", push)


def a_failed_plan_is_not_voided(patch: Patch) -> None:
    patch.setattr(Scheduler, "_void_uncommitted", lambda self: None)


def stale_epochs_are_accepted(patch: Patch) -> None:
    patch.setattr(scheduler_module, "_is_current", lambda plan: True)


def windows_push_into_the_committed_text(patch: Patch) -> None:
    patch.setattr(TextStream, "fork", lambda self: self)


def mismatches_are_not_counted(patch: Patch) -> None:
    def forget(sequence: EngineSequence, window: Window, verdict: Verdict) -> None:
        sequence.stats.mismatches = sequence.stats.recomputed = 0

    _patch_replay(patch, forget)


def deterministic_requests_run_fast(patch: Patch) -> None:
    patch.setattr(Scheduler, "_runs_fast", lambda self, sequence: sequence.num_pending == 1 and bool(sequence.output))


SABOTAGES: dict[Callable[[Patch], None], str] = {
    replay_writes_to_the_dump_slot: "K/V that is not canonical",
    replay_writes_to_each_others_slots: "K/V that is not canonical",
    one_token_too_many_is_accepted: "not what the oracle gives",
    the_drafted_token_is_committed_at_a_mismatch: "not what the oracle gives",
    windows_are_committed_unverified: "not what the oracle gives",
    replays_run_in_fast_passes: "decoding is one row a step",
    canonical_passes_run_in_any_shape: "a canonical pass of 3 rows",
    the_last_position_is_not_compared: "counts of one mismatch",
    fast_kv_counts_as_canonical: "K/V is not canonical",
    windows_are_published: "the prefix cache holds",
    uncommitted_tokens_are_streamed: "not what the oracle gives",
    the_noise_of_drafted_rows_is_off_by_one: "not what the oracle gives",
    the_noise_of_regular_decoding_is_off_by_one: "counts of one mismatch",
    penalties_ignore_the_path: "not what the oracle gives",
    penalties_ignore_the_path_in_regular_decoding: "yet a replay found another token",
    the_window_survives_a_mismatch: "counts of one mismatch",
    the_rest_of_a_cut_window_is_lost: "a cut window goes on",
    the_window_survives_preemption: "a waiting sequence holds slots",
    leases_are_not_trimmed: "a lease between steps",
    leases_keep_a_slot_too_many: "a lease between steps",
    a_finish_in_the_window_ends_the_sequence: "another end than the oracle's",
    a_finish_in_the_window_is_overlooked: "tokens were decoded behind the end",
    a_failed_plan_is_not_voided: "a stale result was committed",
    stale_epochs_are_accepted: "a stale result was committed",
    windows_push_into_the_committed_text: "another end than the oracle's",
    mismatches_are_not_counted: "counts of one mismatch",
    deterministic_requests_run_fast: "not what the oracle gives",
}


@pytest.mark.parametrize("sabotage", SABOTAGES, ids=lambda sabotage: sabotage.__name__)
def test_every_sabotage_is_caught(sabotage: Callable[[Patch], None], monkeypatch: Patch) -> None:
    sabotage(monkeypatch)
    with pytest.raises(AssertionError, match=SABOTAGES[sabotage]):
        check()
