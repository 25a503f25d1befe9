"""Turns a plan and its drafts into passes, and the passes' results into scores per sequence.

Canonical rows are padded to a shape of the family, the cheapest that holds them. Fast rows run in whatever shape they
make, or a larger one that costs less. The verifier holds no state of sequences; it reads them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from verispec.backends.cost import CostTable
from verispec.backends.protocol import (
    Backend,
    DistributionHandle,
    DistributionWanted,
    DrawWanted,
    LogprobsWanted,
    Pass,
    PassKind,
    PassResult,
    RowsBuilder,
    TableUpdate,
    TopKWanted,
    Wanted,
)
from verispec.sampling.rows import SamplingRowsBuilder
from verispec.spec.plan import Plan, PlannedSequence, SequencePlan, WindowPlan
from verispec.types import NO_PARENT, Draft, TokenLogprob, Verdict


@dataclass(frozen=True, slots=True)
class Score:
    """What the target says of one sequence's rows: entry 0 follows the committed tokens, entry 1 + i node i.

    `draws` is empty while the prompt is not complete. `prompt_logprobs` are those of the prompt tokens after each row.
    `distribution` has the rows from `first_row` on, where probabilities judge the draft or are to be shown; then
    `node_logprobs` are the target's, raw, of each node's token.
    """

    draws: NDArray[np.int64]
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    distribution: DistributionHandle | None = None
    first_row: int = 0
    node_logprobs: tuple[float, ...] = ()

    def with_nodes(self, draft: Draft) -> Score:
        """With the target's log-probabilities of all nodes."""
        assert self.distribution is not None
        rows = np.array([self.first_row + 1 + parent for parent in draft.parents], np.int64)
        values = self.distribution.logprobs(rows, np.array(draft.token_ids, np.int64))
        return replace(self, node_logprobs=tuple(values.tolist()))

    def with_verdict(self, draft: Draft, verdict: Verdict) -> Score:
        """With the verdict's tokens in place of the target's draws, where probabilities judged."""
        assert self.distribution is not None
        nodes = (NO_PARENT, *verdict.path)
        tokens = (*(draft.token_ids[node] for node in verdict.path), verdict.bonus_id)
        rows = np.array([self.first_row + 1 + node for node in nodes], np.int64)
        values = self.distribution.logprobs(rows, np.maximum(0, np.array(tokens, np.int64)))
        logprobs = list(self.logprobs)
        for node, token_id, value in zip(nodes, tokens, values.tolist(), strict=True):
            logprobs[node + 1] = TokenLogprob(token_id, value, logprobs[node + 1].alternatives)
        return replace(self, logprobs=tuple(logprobs))


@dataclass(slots=True)
class _PassBuilder:
    """Rows and wishes of one pass, collected sequence by sequence."""

    vocab_size: int
    rows: RowsBuilder = field(default_factory=RowsBuilder)
    sampling: SamplingRowsBuilder = field(default_factory=SamplingRowsBuilder)
    draw_rows: list[int] = field(default_factory=list)
    shown_rows: list[int] = field(default_factory=list)  # rows whose distributions judge a draft, or are shown
    showing: SamplingRowsBuilder = field(default_factory=SamplingRowsBuilder)
    given_rows: list[int] = field(default_factory=list)
    given_ids: list[int] = field(default_factory=list)
    given_counts: list[int] = field(default_factory=list)  # per sequence, how many of the given rows are its own
    top_rows: list[int] = field(default_factory=list)
    top_k: int = 0
    updates: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, plan: SequencePlan, draft: Draft) -> None:
        """Add a sequence's pending rows and, if they complete, its draft's nodes."""
        sequence, params = plan.sequence, plan.sequence.params
        given_before = len(self.given_rows)
        self._update_table(plan.seq_row, plan.table_start, plan.table_slots)
        for i in range(plan.num_pending):
            position = plan.start + i
            row = self.rows.add(
                token_id=sequence.token_ids[position],
                position=position,
                slot=plan.lease.slots[i],
                seq_row=plan.seq_row,
                prefix_len=position + 1,
            )
            if params.prompt_logprobs is not None and position + 1 < sequence.prompt_len:
                self._want_given(row, sequence.token_ids[position + 1], params.prompt_logprobs)
        self.given_counts.append(len(self.given_rows) - given_before)
        if plan.completes:
            self._want_draw(sequence, row, path_ids=(), shows=_shows(sequence, draft))
            add_nodes = self._add_chain if draft.is_chain else self._add_tree
            add_nodes(plan, draft)

    def add_window(self, plan: WindowPlan) -> None:
        """Add the next row of regular decoding."""
        sequence, count = plan.sequence, len(plan.window)
        position = len(sequence.token_ids) - 1 + count
        self._update_table(plan.seq_row, plan.table_start, plan.table_slots)
        row = self.rows.add(
            token_id=plan.window[-1] if plan.window else sequence.token_ids[-1],
            position=position,
            slot=plan.lease.slots[count],
            seq_row=plan.seq_row,
            prefix_len=position + 1,
        )
        self._want_draw(sequence, row, path_ids=plan.window, alternatives=False)

    def _update_table(self, seq_row: int, start: int, slots: Sequence[int]) -> None:
        self.updates += [(seq_row, start + i, slot) for i, slot in enumerate(slots)]

    def _add_chain(self, plan: SequencePlan, draft: Draft) -> None:
        """A chain's slots go into the table: its rows are like a prompt's, however many they are."""
        start = len(plan.sequence.token_ids)
        slots = plan.lease.slots[plan.num_pending : plan.num_pending + len(draft)]
        self._update_table(plan.seq_row, start, slots)
        for node, (token_id, slot) in enumerate(zip(draft.token_ids, slots, strict=True)):
            position = start + node
            row = self.rows.add(
                token_id=token_id, position=position, slot=slot, seq_row=plan.seq_row, prefix_len=position + 1
            )
            shows = _shows(plan.sequence, draft)
            self._want_draw(plan.sequence, row, path_ids=draft.token_ids[: node + 1], shows=shows)

    def _add_tree(self, plan: SequencePlan, draft: Draft) -> None:
        prefix_len = len(plan.sequence.token_ids)
        for node, token_id in enumerate(draft.token_ids):
            path = draft.path_to(node)
            row = self.rows.add(
                token_id=token_id,
                position=prefix_len + len(path) - 1,
                slot=plan.lease.slots[plan.num_pending + node],
                seq_row=plan.seq_row,
                prefix_len=prefix_len,
                tail=tuple(plan.lease.slots[plan.num_pending + i] for i in path),
            )
            path_ids = tuple(draft.token_ids[i] for i in path)
            self._want_draw(plan.sequence, row, path_ids=path_ids, shows=_shows(plan.sequence, draft))

    def _want_draw(
        self,
        sequence: PlannedSequence,
        row: int,
        *,
        path_ids: tuple[int, ...],
        alternatives: bool = True,
        shows: bool = False,
    ) -> None:
        self.draw_rows.append(row)
        if shows:
            self.shown_rows.append(row)
        for sampling in (self.sampling, self.showing) if shows else (self.sampling,):
            sampling.add(
                sequence.params,
                sequence.sample_key,
                t=len(sequence.token_ids) + len(path_ids),
                history=sequence.history(),
                path_ids=path_ids,
                stopping_ids=sequence.stopping_ids,
                vocab_size=self.vocab_size,
            )
        if sequence.params.logprobs and alternatives:
            self._want_top(row, sequence.params.logprobs)

    def _want_given(self, row: int, token_id: int, alternatives: int) -> None:
        self.given_rows.append(row)
        self.given_ids.append(token_id)
        if alternatives:
            self._want_top(row, alternatives)

    def _want_top(self, row: int, k: int) -> None:
        self.top_rows.append(row)
        self.top_k = max(self.top_k, min(k, self.vocab_size))

    def build(self, kind: PassKind, fit: Callable[[int], int]) -> Pass:
        """Freeze into a pass; `fit` gives the shape for a number of rows, for the layers and for the head."""
        ints = np.int32
        update = np.array(self.updates, ints).reshape(-1, 3)
        wanted = Wanted(
            draw=DrawWanted(np.array(self.draw_rows, ints), self.sampling.build()) if self.draw_rows else None,
            logprobs=LogprobsWanted(np.array(self.given_rows, ints), np.array(self.given_ids, ints))
            if self.given_rows
            else None,
            top_k=TopKWanted(np.unique(np.array(self.top_rows, ints)), self.top_k) if self.top_rows else None,
            distribution=DistributionWanted(np.array(self.shown_rows, ints), self.showing.build())
            if self.shown_rows
            else None,
        )
        table_update = TableUpdate(update[:, 0], update[:, 1], update[:, 2])
        num_head = len(wanted.head_rows())
        rows = self.rows.build(fit(len(self.rows)))
        return Pass(kind, rows, wanted, table_update, head_shape=fit(num_head) if num_head else 0)


class Scores(NamedTuple):
    """What a plan's passes gave: one score per judged sequence plan, one token per row of regular decoding.

    The seconds are what each pass took, by the verifier's clock.
    """

    judged: list[Score]
    drafted: list[int]
    canonical_seconds: float
    fast_seconds: float


class Verifier:
    """Runs plans on a backend. `family` are the canonical shapes, `cost` chooses among them and among fast ones."""

    def __init__(
        self,
        backend: Backend,
        *,
        family: Sequence[int],
        cost: CostTable,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._family = tuple(family)
        self._cost = cost
        self._clock = clock
        self._fits: dict[int, int] = {}  # number of rows -> its shape

    def run(self, plan: Plan, drafts: Sequence[Draft]) -> Scores:
        """Run the plan's passes; `drafts` are in the order of `plan.sequences`."""
        split = len(plan.canonical)
        start = self._clock()
        if plan.is_joined:
            judged, drafted = self._run_pass(PassKind.CANONICAL, plan.sequences, drafts, plan.drafting)
            return Scores(judged, drafted, self._clock() - start, 0.0)
        canonical, _ = self._run_pass(PassKind.CANONICAL, plan.canonical, drafts[:split])
        middle = self._clock()
        fast, drafted = self._run_pass(PassKind.FAST, plan.fast, drafts[split:], plan.drafting)
        return Scores(canonical + fast, drafted, middle - start, self._clock() - middle)

    def _run_pass(
        self,
        kind: PassKind,
        plans: Sequence[SequencePlan],
        drafts: Sequence[Draft],
        windows: Sequence[WindowPlan] = (),
    ) -> tuple[list[Score], list[int]]:
        if not plans and not windows:
            return [], []
        builder = _PassBuilder(self._backend.limits.vocab_size)
        for plan, draft in zip(plans, drafts, strict=True):
            builder.add(plan, draft)
        for window in windows:
            builder.add_window(window)
        fit = self._canonical_shape if kind is PassKind.CANONICAL else self._cost.fast_shape
        pass_, start = builder.build(kind, fit), self._clock()
        result = self._backend.submit(pass_).result()
        self._cost.observe_pass(pass_, self._clock() - start)
        scores = _scores(plans, drafts, builder, result)
        drawn = [] if result.draw is None else result.draw.token_ids.tolist()
        return scores, drawn[len(drawn) - len(windows) :]

    def _canonical_shape(self, num_rows: int) -> int:
        if num_rows not in self._fits:
            self._fits[num_rows] = self._cost.cheapest(m for m in self._family if m >= num_rows)
        return self._fits[num_rows]


def _shows(sequence: PlannedSequence, draft: Draft) -> bool:
    """Whether the target's distributions are needed: to judge the draft, or to show it."""
    return judges_by_probability(sequence, draft) or (sequence.is_traced and len(draft) > 0)


def judges_by_probability(sequence: PlannedSequence, draft: Draft) -> bool:
    """Whether the draft is judged by probabilities: the request asked for it, and the drafter has them."""
    return sequence.uses_probabilities and bool(draft.proposals)


def _scores(
    plans: Sequence[SequencePlan], drafts: Sequence[Draft], builder: _PassBuilder, result: PassResult
) -> list[Score]:
    """Cut the pass's flat results into one score per sequence."""
    alternatives: dict[int, list[tuple[int, float]]] = {}
    if result.top_k is not None:
        for row, ids, values in zip(sorted(set(builder.top_rows)), *result.top_k, strict=True):
            alternatives[row] = list(zip(ids.tolist(), values.tolist(), strict=True))
    next_draw, next_given, next_shown = 0, 0, 0
    scores = []
    for plan, draft, num_given in zip(plans, drafts, builder.given_counts, strict=True):
        params = plan.sequence.params
        prompt = []
        for i in range(next_given, next_given + num_given):
            assert result.logprobs is not None
            top = tuple(alternatives.get(builder.given_rows[i], ())[: params.prompt_logprobs])
            prompt.append(TokenLogprob(builder.given_ids[i], float(result.logprobs[i]), top))
        next_given += num_given
        num_draws = 1 + len(draft) if plan.completes else 0
        drawn = []
        for i in range(next_draw, next_draw + num_draws):
            assert result.draw is not None
            top = tuple(alternatives.get(builder.draw_rows[i], ())[: params.logprobs or 0])
            drawn.append(TokenLogprob(int(result.draw.token_ids[i]), float(result.draw.logprobs[i]), top))
        next_draw += num_draws
        draws = np.array([entry.token_id for entry in drawn], np.int64)
        shown = result.distribution if _shows(plan.sequence, draft) and num_draws else None
        scores.append(Score(draws, tuple(drawn), tuple(prompt), shown, next_shown))
        next_shown += num_draws if shown is not None else 0
    return scores
