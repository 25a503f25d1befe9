"""Acceptance: from drafts and the target's draws to verdicts. One batched array function, no state.

Rule `match`: at each node the target has drawn its own token with the position's noise; if a child carries that token,
descend, otherwise the token is the bonus. Every committed token is the target's own draw, whatever the drafter offered.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from verispec.types import NO_PARENT, Draft, Verdict

_NOBODY = NO_PARENT - 1  # padding: nobody's child, and no token


def judge_by_draws(drafts: Sequence[Draft], draws: Sequence[Sequence[int]]) -> list[Verdict]:
    """Rule `match` over all drafts at once.

    `draws[s][0]` is the target's token after the committed ones of draft s, `draws[s][1 + i]` the one after node i.
    Among duplicate siblings the first is taken.
    """
    if len(drafts) == 1:
        return [_alone(drafts[0], draws[0])]
    tokens, parents = _padded([d.token_ids for d in drafts]), _padded([d.parents for d in drafts])  # [S, N]
    drawn = _padded(draws)  # [S, 1 + N]
    num, width = tokens.shape
    in_order = np.arange(width)
    if (parents < in_order - 1).any(where=parents != _NOBODY):
        paths = _walked(tokens, parents, drawn)
    else:  # chains: as far as all tokens are those that were drawn
        paths = np.where(np.cumprod(tokens == drawn[:, :width], axis=1) > 0, in_order, _NOBODY)
    depths = (paths != _NOBODY).sum(axis=1)
    last = np.where(depths > 0, paths[np.arange(num), depths - 1], NO_PARENT) if width else np.full(num, NO_PARENT)
    bonuses = drawn[np.arange(num), last + 1].tolist()
    return [Verdict(tuple(p[:n]), b) for p, n, b in zip(paths.tolist(), depths.tolist(), bonuses, strict=True)]


def _alone(draft: Draft, draws: Sequence[int]) -> Verdict:
    """One draft: a walk costs less than arrays. Children stand behind their parents, duplicates behind the first."""
    node, path = NO_PARENT, []
    for i, (token_id, parent) in enumerate(zip(draft.token_ids, draft.parents, strict=True)):
        if parent == node and token_id == draws[node + 1]:
            node = i
            path.append(i)
    return Verdict(tuple(path), int(draws[node + 1]))


def _padded(rows: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """[S, the longest]"""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    padded = np.full((len(rows), lengths.max(initial=0)), _NOBODY, np.int64)
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = np.fromiter(chain.from_iterable(rows), np.int64)
    return padded


def _walked(tokens: NDArray[np.int64], parents: NDArray[np.int64], drawn: NDArray[np.int64]) -> NDArray[np.int64]:
    """Nodes from the root down, level by level for all drafts; _NOBODY behind the end of a path. [S, N]"""
    every, node = np.arange(len(tokens)), np.full(len(tokens), NO_PARENT, np.int64)
    paths = np.full_like(tokens, _NOBODY)
    for level in range(tokens.shape[1]):
        is_next = (parents == node[:, None]) & (tokens == drawn[every, node + 1][:, None])  # [S, N]
        found = is_next.any(axis=-1)
        if not found.any():
            break
        node = np.where(found, is_next.argmax(axis=-1), node)
        paths[found, level] = node[found]
    return paths
