"""Verdicts of a whole plan: by the target's draws, or by probabilities where a request asks for that."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from verispec.sampling.judge import judge
from verispec.sampling.recursive import Distributions, RoundKeys, judge_recursive
from verispec.spec.plan import Plan, SequencePlan
from verispec.spec.verifier import Score, Scores, judges_by_probability
from verispec.types import Draft, Proposal, Verdict


class _Case(NamedTuple):
    """A draft that probabilities judge."""

    plan: SequencePlan
    draft: Draft
    score: Score


def judge_plan(plan: Plan, drafts: SequenceOf[Draft], scores: Scores) -> tuple[list[Verdict | None], Scores]:
    """Verdicts of the sequences whose rows are complete, None for the others; and the scores with their tokens.

    Distributions end here: nothing after this needs them.
    """
    verdicts: list[Verdict | None] = [None] * len(drafts)
    judged = list(scores.judged)
    complete = [i for i, p in enumerate(plan.sequences) if p.completes]
    by_probability = [i for i in complete if judges_by_probability(plan.sequences[i].sequence, drafts[i])]
    by_draw = [i for i in complete if i not in by_probability]
    matched = judge([drafts[i] for i in by_draw], [judged[i].draws for i in by_draw])
    for i, verdict in zip(by_draw, matched, strict=True):
        verdicts[i] = verdict
    cases = [_Case(plan.sequences[i], drafts[i], judged[i]) for i in by_probability]
    for i, case, verdict in zip(by_probability, cases, _judge_by_probability(cases), strict=True):
        verdicts[i] = verdict
        judged[i] = case.score.with_verdict(case.draft, verdict)
    for i in complete:
        if plan.sequences[i].sequence.is_traced and len(drafts[i]):
            judged[i] = judged[i].with_nodes(drafts[i])
    _release(drafts, judged)
    return verdicts, scores._replace(judged=judged)


def _judge_by_probability(cases: SequenceOf[_Case]) -> list[Verdict]:
    if not cases:
        return []
    width = 1 + max(len(case.draft) for case in cases)
    target = _Gathered(len(cases), width)
    proposal = _Gathered(len(cases), width)
    for s, (_, draft, score) in enumerate(cases):
        for node in range(-1, len(draft)):
            target.add(s, Proposal(node, score.distribution, score.first_row + 1 + node))
        for offered in draft.proposals:
            proposal.add(s, offered)
    keys = [(case.plan.sequence.sample_key, len(case.plan.sequence.token_ids)) for case in cases]
    round_keys = RoundKeys(
        np.array([key.seed for key, _ in keys], np.uint64),
        np.array([key.sample_index for key, _ in keys], np.int64),
        np.array([length for _, length in keys], np.int64),
    )
    return judge_recursive([case.draft for case in cases], target.build(), proposal.build(), round_keys)


class _Gathered:
    """Rows of several handles, side by side."""

    def __init__(self, num_drafts: int, width: int) -> None:
        self._rows = np.full((num_drafts, width), -1, np.int64)
        self._offsets: dict[int, int] = {}
        self._values: list[NDArray[np.float32]] = []
        self._num_rows = 0

    def add(self, draft: int, row: Proposal) -> None:
        """The distribution after a node of a draft."""
        key = id(row.handle)
        if key not in self._offsets:
            self._offsets[key] = self._num_rows
            self._values.append(np.asarray(row.handle.probabilities()))
            self._num_rows += len(self._values[-1])
        self._rows[draft, row.node + 1] = self._offsets[key] + row.row

    def build(self) -> Distributions:
        return Distributions(np.concatenate(self._values), self._rows)


def _release(drafts: SequenceOf[Draft], scores: SequenceOf[Score]) -> None:
    for draft, score in zip(drafts, scores, strict=True):
        for handle in (score.distribution, *(p.handle for p in draft.proposals)):
            if handle is not None:
                handle.release()
