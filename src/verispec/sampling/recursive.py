"""Acceptance by probabilities: recursive rejection sampling of drafts that were drawn without replacement.

Rule `recursive`; on a chain it is the classical rule `rejection`. The children of a node, in index order, are draws
without replacement from the node's proposal p. Each is accepted with probability min(1, q / p); a rejected one leaves
the residual of q, and p without it. What is committed is distributed as the target's own draws, provided that the
draft's noise serves nothing else and that no child was left out because of which token it is.

Noise: a uniform is made of ids 0 and 1 of one stream, with the committed length at the start of the round as t. Node i
has the coin COIN + 256 i; the draw that ends the round at node i has RESIDUAL + 256 (1 + i), at the root RESIDUAL. A
round commits at least one token and judges a node at most once, so nothing is ever used twice.

Sums over the vocabulary are trees of neighbours, so that a device that adds them in parts has the same bits; whoever
draws goes down the same tree. `docs/determinism.md` writes it out, and `backends/cuda/weighing.cu` does it on a GPU.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from verispec.sampling.draw import NO_TOKEN
from verispec.sampling.noise import NODE_STRIDE, Domain, noise_words, split_seeds, stream
from verispec.types import NO_PARENT, Draft, Verdict

_Floats = NDArray[np.float64]
_Ints = NDArray[np.int64]
_NOTHING = 2.0**-1000  # a mass that is not above it is none


class Distributions(NamedTuple):
    """Probabilities, and which of their rows belongs where in each draft."""

    values: NDArray[Any]  # [R, V] float32 or float64
    rows: _Ints  # [S, 1 + N] entry 0: after the committed tokens; 1 + i: after node i; -1 where there is none


class RoundKeys(NamedTuple):
    """What keys the noise of each sequence's round."""

    seeds: NDArray[np.uint64]  # [S]
    sample_index: _Ints  # [S]
    committed_len: _Ints  # [S] at the start of the round


class _Scaled(NamedTuple):
    """Distributions: `factors` times `values` add up to 1. They are written in place."""

    values: _Floats  # [A, V]
    factors: _Floats  # [A]

    def some(self, rows: NDArray[Any]) -> "_Scaled":
        return _Scaled(self.values[rows], self.factors[rows])

    def at(self, rows: _Ints, x: _Ints) -> _Floats:
        """Probabilities of one id at each of these rows."""
        found: _Floats = self.values[rows, x] * self.factors[rows]
        return found


class _Trees(NamedTuple):
    """Drafts side by side."""

    tokens: _Ints  # [S, N]
    parents: _Ints  # [S, N] padding is nobody's child


def judge_recursive(
    drafts: Sequence[Draft], target: Distributions, proposal: Distributions, keys: RoundKeys
) -> list[Verdict]:
    """Judge valid drafts (`Draft.is_valid`) against the target's distributions, all at once.

    The bonus is NO_TOKEN where the target has no usable distribution at the node reached: no row, or NaN in it. The
    children of a node without a usable proposal are not looked at: the draw there is the target's own.
    """
    trees = _side_by_side(drafts)
    nodes = np.full(len(drafts), NO_PARENT, np.int64)
    bonus_ids = np.full(len(drafts), NO_TOKEN, np.int64)
    paths: list[list[int]] = [[] for _ in drafts]
    going = np.arange(len(drafts))
    for _ in range(1 + trees.tokens.shape[-1]):
        q, usable = _probabilities(target, going, nodes[going], target.values.shape[-1])
        going, q = going[usable], q.some(usable)
        children = _try_children(trees, q, proposal, keys, going, nodes[going])
        ending, moving = children == NO_PARENT, children != NO_PARENT
        bonus_ids[going[ending]] = _draw(q.values[ending], keys, going[ending], nodes[going[ending]])
        going = going[moving]
        nodes[going] = children[moving]
        for s, node in zip(going.tolist(), nodes[going].tolist(), strict=True):
            paths[s].append(node)
        if not len(going):
            break
    return [Verdict(tuple(path), bonus_id) for path, bonus_id in zip(paths, bonus_ids.tolist(), strict=True)]


def _try_children(
    trees: _Trees, q: _Scaled, proposal: Distributions, keys: RoundKeys, sequences: _Ints, nodes: _Ints
) -> _Ints:
    """The accepted child of each sequence's node, or NO_PARENT; q becomes what the rejections before it left. [A]

    A child whose p is 0 was not drawn from p: a second copy of a token, or a forged one. It is rejected and passed
    over: to take a residual for it would remove mass that no draw from p ever had the chance to commit.
    """
    p, usable = _probabilities(proposal, sequences, nodes, q.values.shape[-1])
    is_child = (trees.parents[sequences] == nodes[:, None]) & usable[:, None]  # [A, N]
    order = np.argsort(~is_child, axis=-1, kind="stable")  # children first, in the order drawn
    num_children = is_child.sum(axis=-1)
    accepted = np.full(len(sequences), NO_PARENT, np.int64)
    for rank in range(num_children.max(initial=0)):
        here = np.flatnonzero((num_children > rank) & (accepted == NO_PARENT))
        child = order[here, rank]
        x = trees.tokens[sequences[here], child]
        p_x, q_x = p.at(here, x), q.at(here, x)
        coin = _uniforms(keys, sequences[here], stream(Domain.COIN) + NODE_STRIDE * child)
        is_drawn = p_x > 0
        is_accepted = is_drawn & (coin * p_x < q_x)
        accepted[here[is_accepted]] = child[is_accepted]
        is_rejected = is_drawn & ~is_accepted
        _reject(q, p, here[is_rejected], x[is_rejected])
    return accepted


def _reject(q: _Scaled, p: _Scaled, rows: _Ints, x: _Ints) -> None:
    """Leave max(q - p, 0) of q, and p without x, one x for each of these rows.

    A residual that is numerically empty leaves q as it is; p with nothing left is all 0.
    """
    residual = np.maximum(q.values[rows] * q.factors[rows, None] - p.values[rows] * p.factors[rows, None], 0.0)
    mass = _sums(residual)[-1][:, 0]
    left = mass > _NOTHING
    q.values[rows[left]], q.factors[rows[left]] = residual[left], 1.0 / mass[left]
    p.values[rows, x] = 0.0
    mass = _sums(p.values[rows])[-1][:, 0]
    p.factors[rows] = 1.0 / np.where(mass > _NOTHING, mass, 1.0)


def _sums(values: _Floats) -> list[_Floats]:
    """Neighbours added pairwise, level by level, a last one without a neighbour as it is: from the values to the whole.

    [A, V], [A, V / 2], ..., [A, 1]
    """
    levels = [values]
    while levels[-1].shape[-1] > 1:
        pairs = levels[-1][:, ::2].copy()
        second = levels[-1][:, 1::2]
        pairs[:, : second.shape[-1]] += second
        levels.append(pairs)
    return levels


def _draw(q: _Floats, keys: RoundKeys, sequences: _Ints, nodes: _Ints) -> _Ints:
    """The token that ends each round, by inversion: u times the whole, down the tree of sums. [A]

    Nobody goes where there is no mass, whatever rounding does to the rest.
    """
    *levels, whole = _sums(q)
    left_over = _uniforms(keys, sequences, stream(Domain.RESIDUAL) + NODE_STRIDE * (1 + nodes)) * whole[:, 0]
    rows, at = np.arange(len(q)), np.zeros(len(q), np.int64)
    for level in reversed(levels):
        last = level.shape[-1] - 1
        left, right = level[rows, 2 * at], np.where(2 * at < last, level[rows, np.minimum(2 * at + 1, last)], 0.0)
        goes_right = (right > 0) & (left_over >= left)
        left_over = np.where(goes_right, left_over - left, left_over)
        at = 2 * at + goes_right
    return at


def _uniforms(keys: RoundKeys, sequences: _Ints, streams: _Ints) -> _Floats:
    """(r + 0.5) * 2^-52, r of 52 bits: strictly between 0 and 1, and exact. [A]

    One bit less than a float64 holds, because r + 0.5 of 53 bits would round up to 1.
    """
    seed_low, seed_high = split_seeds(keys.seeds[sequences])
    words = noise_words(
        np.arange(2)[:, None],
        seed_low=seed_low,
        seed_high=seed_high,
        t=keys.committed_len[sequences],
        sample_index=keys.sample_index[sequences],
        stream=streams,
    )  # [2, A]
    u: _Floats = ((words[0] << 20) + (words[1] >> 12) + 0.5) * 2.0**-52
    return u


def _probabilities(
    distributions: Distributions, sequences: _Ints, nodes: _Ints, vocab_size: int
) -> tuple[_Scaled, NDArray[np.bool_]]:
    """The distribution after each sequence's node, in float64, and whether it is usable. [A, V], [A]

    Unusable is one that is not there, holds NaN, infinity or a negative number, or is 0 everywhere; it is given as 0.
    """
    rows = distributions.rows[sequences, nodes + 1]
    values = np.zeros((len(rows), vocab_size))
    is_there = rows >= 0
    if is_there.any():
        values[is_there] = distributions.values[rows[is_there]]
    with np.errstate(invalid="ignore"):
        mass = _sums(values)[-1][:, 0]
        usable = (values.min(axis=-1) >= 0) & (mass > _NOTHING) & np.isfinite(mass)
    values[~usable] = 0.0
    return _Scaled(values, 1.0 / np.where(usable, mass, 1.0)), usable


def _side_by_side(drafts: Sequence[Draft]) -> _Trees:
    shape = len(drafts), max((len(d) for d in drafts), default=0)
    trees = _Trees(np.full(shape, NO_TOKEN, np.int64), np.full(shape, NO_PARENT - 1, np.int64))
    for s, draft in enumerate(drafts):
        trees.tokens[s, : len(draft)] = draft.token_ids
        trees.parents[s, : len(draft)] = draft.parents
    return trees
