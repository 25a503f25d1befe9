"""Acceptance: from drafts and the target's draws to verdicts. One batched array function, no state.

Rule `match`: at each node the target has drawn its own token with the position's noise; if a child carries that token,
descend, otherwise the token is the bonus. Every committed token is the target's own draw, whatever the drafter offered.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from verispec.types import NO_PARENT, Draft, Verdict


def judge_by_draws(drafts: Sequence[Draft], draws: Sequence[Sequence[int]]) -> list[Verdict]:
    """Rule `match` over all drafts at once.

    `draws[s][0]` is the target's token after the committed ones of draft s, `draws[s][1 + i]` the one after node i.
    Among duplicate siblings the first is taken.
    """
    num, width = len(drafts), max((len(d) for d in drafts), default=0)
    tokens = np.full((num, width), -1, np.int64)  # [S, N]
    parents = np.full((num, width), NO_PARENT - 1, np.int64)  # padding is nobody's child
    drawn = np.full((num, width + 1), -1, np.int64)  # [S, 1 + N]
    for s, (draft, row) in enumerate(zip(drafts, draws, strict=True)):
        tokens[s, : len(draft)] = draft.token_ids
        parents[s, : len(draft)] = draft.parents
        drawn[s, : len(row)] = row
    node = np.full(num, NO_PARENT, np.int64)
    paths: list[list[int]] = [[] for _ in range(num)]
    every = np.arange(num)
    for _ in range(width):
        is_next = (parents == node[:, None]) & (tokens == drawn[every, node + 1][:, None])  # [S, N]
        child = np.where(is_next.any(axis=-1), is_next.argmax(axis=-1), node)
        moved = np.flatnonzero(child != node)
        if not len(moved):
            break
        for s in moved.tolist():
            paths[s].append(int(child[s]))
        node = child
    return [Verdict(tuple(path), int(drawn[s, node[s] + 1])) for s, path in enumerate(paths)]
