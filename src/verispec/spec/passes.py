"""Turns into passes, and results back into turns. A step has at most one canonical and one fast pass.

Canonical: prompts, plain rows and drafts that are ready, padded to a shape of the family. Fast: rows of requests that
asked for no determinism, and drafts that grow by fast rounds, together. Rows of both may share one canonical pass where
that is cheaper: canonical rows do not notice, because they are pure, and the others may run in any shape.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from verispec.backends.pass_builder import PassBuilder, columns_pass
from verispec.backends.protocol import FROM_STATE, Backend, Pass, PassKind, PassResult, Ticket
from verispec.spec.backend_rounds import rounds_of
from verispec.spec.turn import Cohort, Pending, Places, Recipe, Score, Step, Turn
from verispec.types import NO_DRAFT, Draft, TokenLogprob

Fit = Callable[[int], int]
Observe = Callable[[Pass, float, int], None]
_Records = tuple[Sequence[Turn], Sequence[Cohort]]


class _Mark(NamedTuple):
    """How many results of each kind a pass was asked for so far: where those of the next turn begin."""

    draws: int
    given: int
    shown: int

    @classmethod
    def of(cls, builder: PassBuilder) -> _Mark:
        return cls(len(builder.draw.rows), len(builder.given_rows), len(builder.shown_rows))


@dataclass(slots=True)
class _Part:
    """One pass of a flight: its turns, where their results begin and end, its cohorts behind them, and the ticket."""

    turns: list[Turn]
    cohorts: list[Cohort]
    builder: PassBuilder | None  # of a pass that has turns
    marks: list[_Mark]
    pass_: Pass
    submitted: float
    ticket: Ticket


class _Timing:
    """Who hears how long passes took. One that was submitted while another ran began behind it."""

    def __init__(self, clock: Callable[[], float], observe: Observe) -> None:
        self.clock, self.observe = clock, observe
        self._last_end = -math.inf

    def seconds_since(self, submitted: float) -> float:
        begin, self._last_end = max(submitted, self._last_end), self.clock()
        return self._last_end - begin


class Flight:
    """A step that was submitted. `collect` waits for it and fills in the scores."""

    def __init__(self, step: Step, parts: Sequence[_Part], timing: _Timing) -> None:
        self.step = step
        self._parts = parts
        self._timing = timing

    def collect(self) -> Step:
        has_caught_up = self._settle()
        for part in self._parts:
            result = part.ticket.result()
            seconds = max(0.0, self._timing.seconds_since(part.submitted) - result.host_seconds)
            _fill(part, result)
            if len(self._parts) == 1 and not has_caught_up:  # one of two cannot be timed
                self._time(part.pass_, result, seconds)
            for turn in part.turns:
                turn.seconds = seconds
            for cohort in part.cohorts:
                cohort.seconds = seconds
        return self.step

    def _settle(self) -> bool:
        """Whether a drafter's pass was sent before it and not waited for; that has ended now."""
        catch_ups = [turn.catch_up for turn in self.step.turns if turn.catch_up and turn.catch_up.ticket is not None]
        for catch_up in catch_ups:
            catch_up.settle()
        return bool(catch_ups)

    def _time(self, pass_: Pass, result: PassResult, seconds: float) -> None:
        """Tell how long a pass took; the rounds of a burst, if they are of one shape, share its time."""
        observe = self._timing.observe
        if pass_.burst is None or result.burst is None:
            observe(pass_, seconds, 1)
        elif not pass_.burst.drafts and pass_.burst.follow is None and pass_.burst.shape == len(pass_.rows):
            num_rounds = 1 + int((result.burst.token_ids >= 0).any(axis=0).sum())
            observe(pass_, seconds, num_rounds)

    def abandon(self) -> None:
        """Wait until nothing of it runs any more, whatever comes of it."""
        self._settle()
        for part in self._parts:
            with contextlib.suppress(Exception):  # it was given up already
                part.ticket.result()


class Passes:
    """Submits steps.

    `canonical_shape` and `fast_shape` give the shape of a pass for a number of rows; `joins` says whether rows of both
    kinds, that many of each, should share a canonical pass; `observe` hears how long passes took.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        canonical_shape: Fit,
        fast_shape: Fit,
        joins: Callable[[int, int], bool],
        observe: Observe = lambda pass_, seconds, num_rounds: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._canonical_shape = canonical_shape
        self._fast_shape = fast_shape
        self._joins = joins
        self._timing = _Timing(clock, observe)
        self._next_mask = 1
        self.newest: Pass | None = None  # submitted last

    def submit(self, step: Step) -> Flight:
        self._next_mask = 1
        _fit_masks(step.turns, self._backend.limits.num_masks)
        canonical: tuple[list[Turn], list[Cohort]] = ([], [])
        fast: tuple[list[Turn], list[Cohort]] = ([], [])
        for turn in step.turns:
            is_canonical = turn.is_canonical and not isinstance(turn.draft, Pending)
            (canonical if is_canonical else fast)[0].append(turn)
        for cohort in step.cohorts:
            (canonical if cohort.is_canonical else fast)[1].append(cohort)
        has_fast = any(fast)
        if has_fast and any(canonical) and self._joins_all(canonical, fast):
            canonical, has_fast = (canonical[0] + fast[0], canonical[1] + fast[1]), False
        parts: list[_Part] = []
        flight = Flight(step, parts, self._timing)
        try:
            if any(canonical):
                parts.append(self._submit(PassKind.CANONICAL, *canonical, self._canonical_shape))
            if has_fast:
                parts.append(self._submit(PassKind.FAST, *fast, self._fast_shape))
        except BaseException:
            flight.abandon()
            raise
        return flight

    def _joins_all(self, canonical: _Records, fast: _Records) -> bool:
        """Whether one canonical pass is to have all rows. Further rounds of fast rows have no place in one."""
        if any(record.num_rounds > 1 for part in fast for record in part):
            return False
        return self._joins(_num_rows(*canonical), _num_rows(*fast))

    def _submit(self, kind: PassKind, turns: list[Turn], cohorts: list[Cohort], fit: Fit) -> _Part:
        builder, marks = None, [_Mark(0, 0, 0)]
        if not turns and len(cohorts) == 1:
            pass_ = cohort_pass(kind, fit, cohorts[0])
        else:
            builder = PassBuilder()
            for turn in turns:
                add_turn(builder, turn)
                marks.append(_Mark.of(builder))
            for cohort in cohorts:
                add_cohort(builder, cohort)
            self._next_mask = builder.send_masks(self._backend, self._next_mask)
            pass_ = builder.build(kind, fit, vocab_size=self._backend.limits.vocab_size)
        self.newest = pass_
        return _Part(turns, cohorts, builder, marks, pass_, self._timing.clock(), self._backend.submit(pass_))


def _fit_masks(turns: Sequence[Turn], num_masks: int) -> None:
    """Drop drafts under constraints that the mask table has no rows for; one row of each sequence always fits."""
    constrained = [turn for turn in turns if turn.sequence.constraint is not None]
    left = num_masks - 1 - len(constrained)
    for turn in constrained:
        if isinstance(turn.draft, Draft):
            if len(turn.draft) > left:
                turn.draft, turn.places = NO_DRAFT, ()
            left -= len(turn.draft)


def _num_rows(turns: Sequence[Turn], cohorts: Sequence[Cohort]) -> int:
    rows = sum(1 if isinstance(t.draft, Pending) else t.num_pending + len(t.draft) for t in turns)
    return rows + sum(len(c.sequences) for c in cohorts)


def cohort_pass(kind: PassKind, fit: Fit, cohort: Cohort) -> Pass:
    """The pass of a cohort that nobody else takes part in."""
    return columns_pass(
        kind,
        fit,
        seq_rows=cohort.seq_rows,
        positions=cohort.positions,
        token_ids=None if cohort.is_ahead else [s.token_ids[-1] for s in cohort.sequences],
        slots=cohort.lease.slots,
        num_rounds=cohort.num_rounds,
        feeds=cohort.feeds,
    )


def add_cohort(builder: PassBuilder, cohort: Cohort) -> None:
    """One row of every sequence: its last token."""
    count, seq_rows, slots = cohort.num_rounds, cohort.seq_rows, cohort.lease.slots
    if cohort.is_ahead:
        tokens, positions = [FROM_STATE] * len(seq_rows), [0] * len(seq_rows)
    else:
        tokens, positions = [s.token_ids[-1] for s in cohort.sequences], cohort.positions
    builder.table_rows += seq_rows * count
    for i in range(count):
        builder.table_positions += [position + i for position in cohort.positions]
    builder.table_slots += slots
    rows = builder.add_columns(seq_rows, positions, tokens, slots[: len(seq_rows)])
    if count > 1 or cohort.feeds:
        builder.fed_rows += rows
        builder.fed_rounds += [count - 1] * len(rows)


def add_turn(builder: PassBuilder, turn: Turn) -> None:
    """A turn's rows: pending tokens, then its draft's nodes; or the one row that a growing draft goes on from."""
    sequence, draft = turn.sequence, turn.draft
    builder.update_table(turn.seq_row, turn.table_start, turn.table_slots)
    if isinstance(draft, Pending):
        behind = len(draft.token_ids)
        token_id = draft.token_ids[-1] if behind else sequence.token_ids[-1]
        row = builder.add_chain(turn.seq_row, turn.start + behind, (token_id,), (turn.slots[behind],))
        builder.draw.rows.append(row)
        _mask(builder, turn.places, range(row, row + 1))
        builder.feed_back(row, turn.num_rounds)
        return
    if isinstance(draft, Recipe) and turn.num_behind:
        builder.add_drafted_ahead(turn.seq_row, draft.num_nodes, turn.num_rounds, draft.rule)
        return
    if isinstance(draft, Recipe):
        slots = turn.slots[: 1 + draft.num_nodes]
        builder.add_drafted(turn.seq_row, turn.start, sequence.token_ids[-1], slots, turn.num_rounds, draft.rule)
        return
    start, count = turn.start, turn.num_pending
    tokens = sequence.token_ids[start : start + count]
    row = builder.add_chain(turn.seq_row, start, tokens, turn.slots[:count]) + count - 1
    if sequence.params.prompt_logprobs is not None:
        _want_prompt(builder, turn, row - count + 1)
    if turn.completes:
        _want_draws(builder, turn, range(row, row + 1))
        _mask(builder, turn.places[:1] or (sequence.constraint,), range(row, row + 1))
        if turn.is_fed:
            builder.feed_back(row, turn.num_rounds, sequence.constraint, until_narrow=sequence.may_draft)
        if len(draft):
            _add_nodes(builder, turn, draft)


def _add_nodes(builder: PassBuilder, turn: Turn, draft: Draft) -> None:
    """A chain's slots are in the table: its rows are like a prompt's. Only nodes of a tree need tails."""
    start, first = turn.start + turn.num_pending, turn.num_pending
    if draft.is_chain:
        slots = turn.slots[first : first + len(draft)]
        row = builder.add_chain(turn.seq_row, start, draft.token_ids, slots)
        _want_draws(builder, turn, range(row, row + len(draft)))
        _mask(builder, turn.places[1:], range(row, row + len(draft)))
        return
    for node, token_id in enumerate(draft.token_ids):
        path = draft.path_to(node)
        tail = [turn.slots[first + i] for i in path]
        row = builder.add_node(turn.seq_row, start + len(path) - 1, token_id, tail)
        _want_draws(builder, turn, range(row, row + 1))
        _mask(builder, turn.places[1 + node : 2 + node], range(row, row + 1))


def _mask(builder: PassBuilder, places: Places, rows: range) -> None:
    """What may be drawn at rows; where there are no places, everything."""
    builder.masked += [(row, place.allowed) for row, place in zip(rows, places, strict=False) if place is not None]


def _want_draws(builder: PassBuilder, turn: Turn, rows: range) -> None:
    builder.draw.rows += rows
    if turn.shows_distributions:
        builder.shown_rows += rows
    if turn.sequence.params.logprobs:
        for row in rows:
            builder.want_top(row, turn.sequence.params.logprobs)


def _want_prompt(builder: PassBuilder, turn: Turn, first_row: int) -> None:
    sequence = turn.sequence
    alternatives = sequence.params.prompt_logprobs
    for position in range(turn.start, min(turn.start + turn.num_pending, sequence.prompt_len - 1)):
        row = first_row + position - turn.start
        builder.given_rows.append(row)
        builder.given_ids.append(sequence.token_ids[position + 1])
        if alternatives:
            builder.want_top(row, alternatives)


def _fill(part: _Part, result: PassResult) -> None:
    """Cut the pass's flat results into scores."""
    if part.turns:
        _fill_turns(part, result)
    first, num_fed = part.marks[-1].draws, sum(t.is_fed for t in part.turns)
    for cohort in part.cohorts:
        assert result.draw is not None
        end, count = first + len(cohort.sequences), cohort.num_rounds
        tokens, logprobs = result.draw.token_ids[first:end, None], result.draw.logprobs[first:end, None]
        if count > 1:
            assert result.burst is not None
            fed = slice(num_fed, num_fed + end - first)
            tokens = np.concatenate((tokens, result.burst.token_ids[fed, : count - 1]), axis=1)
            logprobs = np.concatenate((logprobs, result.burst.logprobs[fed, : count - 1]), axis=1)
        if count > 1 or cohort.feeds:
            num_fed += end - first
        cohort.draws, cohort.logprobs = tokens.tolist(), logprobs.tolist()
        first = end
    assert result.draw is None or first == len(result.draw.token_ids) or not part.cohorts


def _fill_turns(part: _Part, result: PassResult) -> None:
    builder, num_fed = part.builder, 0
    assert builder is not None
    tokens = result.draw.token_ids.tolist() if result.draw is not None else []
    logprobs = result.draw.logprobs.tolist() if result.draw is not None else []
    given = result.logprobs.tolist() if result.logprobs is not None else []
    top: dict[int, tuple[tuple[int, float], ...]] = {}
    if result.top_k is not None:
        for row, ids, values in zip(sorted(set(builder.top_rows)), *result.top_k, strict=True):
            top[row] = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    for turn, start, end in zip(part.turns, part.marks[:-1], part.marks[1:], strict=True):
        score = Score(tokens[start.draws : end.draws], logprobs[start.draws : end.draws])
        if isinstance(turn.draft, Recipe):
            assert result.burst is not None
            turn.score = score
            turn.rounds = rounds_of(turn, turn.draft, result.burst, num_fed)
            num_fed += 1
            continue
        if turn.rides or isinstance(turn.draft, Pending):
            assert result.burst is not None
            score.draws += result.burst.token_ids[num_fed, : turn.num_rounds - 1].tolist()
            score.logprobs += result.burst.logprobs[num_fed, : turn.num_rounds - 1].tolist()
        num_fed += turn.is_fed
        kept = turn.sequence.params.logprobs
        if kept and isinstance(turn.draft, Draft):
            score.alternatives = [top.get(row, ())[:kept] for row in builder.draw.rows[start.draws : end.draws]]
        if end.given > start.given:
            kept = turn.sequence.params.prompt_logprobs or 0
            score.prompt_logprobs = tuple(
                TokenLogprob(builder.given_ids[i], given[i], top.get(builder.given_rows[i], ())[:kept])
                for i in range(start.given, end.given)
            )
        if end.shown > start.shown:
            score.distribution, score.first_row = result.distribution, start.shown
        turn.score = score
