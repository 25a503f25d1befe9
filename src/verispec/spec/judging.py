"""Verdicts of a step: by the target's draws, or by probabilities where a request asks for that.

Rule `match`: at each node the target has drawn its own token with the position's noise; if a child carries that token,
descend, otherwise the token is the bonus. Every committed token is the target's own draw, whatever the drafter offered.
The rules by probabilities are in `sampling/recursive.py`.
"""

from collections.abc import Sequence

import numpy as np

from verispec.backends.weighing import Gathered
from verispec.sampling.recursive import RoundKeys, judge_recursive
from verispec.spec.turn import Turn
from verispec.types import NO_PARENT, Draft, Proposal, Verdict

_Judged = list[tuple[Turn, Draft]]


def judge(turns: Sequence[Turn]) -> Sequence[Turn]:
    """Fill in the verdicts of turns whose rows are complete. Distributions end here: nothing after this needs them."""
    by_probability: _Judged = []
    drafted: _Judged = []
    for turn in turns:
        draft = turn.draft
        if not turn.completes or not isinstance(draft, Draft):
            continue
        if len(draft):
            drafted.append((turn, draft))
        if len(draft) and turn.judges_by_probability:
            by_probability.append((turn, draft))
        else:
            turn.verdict = match(draft, turn.score.draws)
    if by_probability:
        _judge_by_probability(by_probability)
    for turn, draft in drafted:
        if turn.sequence.is_traced:
            turn.score.node_logprobs = tuple(_logprobs(turn, draft.parents, draft.token_ids))
    for turn, draft in drafted:  # only now: turns of one pass share a handle
        for handle in (turn.score.distribution, *(p.handle for p in draft.proposals)):
            if handle is not None:
                handle.release()
    return turns


def match(draft: Draft, draws: Sequence[int]) -> Verdict:
    """`draws[0]` is the target's token behind the committed ones, `draws[1 + i]` the one behind node i.

    Children stand behind their parents; among duplicate siblings the first is taken. For drafts of a few dozen nodes a
    walk costs less than arrays over all drafts.
    """
    if draft.is_chain:
        count = next((i for i, (a, b) in enumerate(zip(draft.token_ids, draws, strict=False)) if a != b), len(draft))
        return Verdict(tuple(range(count)), draws[count])
    node, drawn, path = NO_PARENT, draws[0], []
    for i, parent in enumerate(draft.parents):
        if parent == node and draft.token_ids[i] == drawn:
            node, drawn = i, draws[i + 1]
            path.append(i)
    return Verdict(tuple(path), drawn)


def _logprobs(turn: Turn, nodes: Sequence[int], token_ids: Sequence[int]) -> list[float]:
    """The target's raw log-probabilities of one token behind each of these nodes."""
    score = turn.score
    assert score.distribution is not None
    rows = np.array([score.first_row + 1 + node for node in nodes], np.int64)
    values: list[float] = score.distribution.logprobs(rows, np.maximum(0, np.array(token_ids, np.int64))).tolist()
    return values


def _judge_by_probability(judged: _Judged) -> None:
    """The verdicts, with their tokens in place of the target's draws."""
    width = 1 + max(len(draft) for _, draft in judged)
    target, proposal = Gathered(len(judged), width), Gathered(len(judged), width)
    for s, (turn, draft) in enumerate(judged):
        for node in range(-1, len(draft)):
            target.add(s, Proposal(node, turn.score.distribution, turn.score.first_row + 1 + node))
        for offered in draft.proposals:
            proposal.add(s, offered)
    sequences = [turn.sequence for turn, _ in judged]
    round_keys = RoundKeys(
        np.array([s.sample_key.seed for s in sequences], np.uint64),
        np.array([s.sample_key.sample_index for s in sequences], np.int64),
        np.array([len(s.token_ids) for s in sequences], np.int64),
    )
    verdicts = judge_recursive([draft for _, draft in judged], target.build(), proposal.build(), round_keys)
    for (turn, draft), verdict in zip(judged, verdicts, strict=True):
        turn.verdict = verdict
        nodes = (NO_PARENT, *verdict.path)
        tokens = (*(draft.token_ids[node] for node in verdict.path), verdict.bonus_id)
        for node, token_id, value in zip(nodes, tokens, _logprobs(turn, nodes, tokens), strict=True):
            turn.score.draws[node + 1], turn.score.logprobs[node + 1] = token_id, value
