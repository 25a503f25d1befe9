"""Verdicts of a step: by the target's draws, or by probabilities where a request asks for that."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from verispec.sampling.judge import judge_by_draws
from verispec.sampling.recursive import Distributions, RoundKeys, judge_recursive
from verispec.spec.turn import Turn
from verispec.types import NO_PARENT, Draft, Proposal, Verdict


def judge(turns: Sequence[Turn]) -> Sequence[Turn]:
    """Fill in the verdicts of turns whose rows are complete. Distributions end here: nothing after this needs them."""
    drafted: list[Turn] = []
    for turn in turns:
        draft = turn.draft
        if not turn.completes or not isinstance(draft, Draft):
            continue
        if len(draft):
            drafted.append(turn)
        else:
            turn.verdict = Verdict((), turn.score.draws[0])
    if drafted:
        _judge_drafts(drafted)
    return turns


def _judge_drafts(turns: Sequence[Turn]) -> None:
    by_draw = [t for t in turns if not t.judges_by_probability]
    by_probability = [t for t in turns if t.judges_by_probability]
    drafts: list[Draft] = [t.draft for t in by_draw]  # type: ignore[misc]
    for turn, verdict in zip(by_draw, judge_by_draws(drafts, [t.score.draws for t in by_draw]), strict=True):
        turn.verdict = verdict
    for turn, verdict in zip(by_probability, _by_probability(by_probability), strict=True):
        turn.verdict = verdict
        _take_verdict(turn, verdict)
    for turn in turns:
        if turn.sequence.is_traced:
            _note_nodes(turn)
    for turn in turns:  # only now: turns of one pass share a handle
        _release(turn)


def _take_verdict(turn: Turn, verdict: Verdict) -> None:
    """The verdict's tokens in place of the target's draws, where probabilities judged."""
    draft, score = turn.draft, turn.score
    assert isinstance(draft, Draft)
    assert score.distribution is not None
    nodes = (NO_PARENT, *verdict.path)
    tokens = (*(draft.token_ids[node] for node in verdict.path), verdict.bonus_id)
    rows = np.array([score.first_row + 1 + node for node in nodes], np.int64)
    values = score.distribution.logprobs(rows, np.maximum(0, np.array(tokens, np.int64)))
    for node, token_id, value in zip(nodes, tokens, values.tolist(), strict=True):
        score.draws[node + 1], score.logprobs[node + 1] = token_id, value


def _note_nodes(turn: Turn) -> None:
    """The target's log-probabilities of all nodes, to be shown."""
    draft, score = turn.draft, turn.score
    assert isinstance(draft, Draft)
    assert score.distribution is not None
    rows = np.array([score.first_row + 1 + parent for parent in draft.parents], np.int64)
    values = score.distribution.logprobs(rows, np.array(draft.token_ids, np.int64))
    score.node_logprobs = tuple(values.tolist())


def _by_probability(turns: Sequence[Turn]) -> list[Verdict]:
    if not turns:
        return []
    drafts: list[Draft] = [t.draft for t in turns]  # type: ignore[misc]
    width = 1 + max(map(len, drafts))
    target = _Gathered(len(turns), width)
    proposal = _Gathered(len(turns), width)
    for s, (turn, draft) in enumerate(zip(turns, drafts, strict=True)):
        for node in range(-1, len(draft)):
            target.add(s, Proposal(node, turn.score.distribution, turn.score.first_row + 1 + node))
        for offered in draft.proposals:
            proposal.add(s, offered)
    round_keys = RoundKeys(
        np.array([t.sequence.sample_key.seed for t in turns], np.uint64),
        np.array([t.sequence.sample_key.sample_index for t in turns], np.int64),
        np.array([len(t.sequence.token_ids) for t in turns], np.int64),
    )
    return judge_recursive(drafts, target.build(), proposal.build(), round_keys)


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


def _release(turn: Turn) -> None:
    assert isinstance(turn.draft, Draft)
    for handle in (turn.score.distribution, *(p.handle for p in turn.draft.proposals)):
        if handle is not None:
            handle.release()
