"""Acceptance by probabilities: recursive rejection sampling of drafts that were drawn without replacement.

Rule `recursive`; on a chain it is the classical rule `rejection`. The children of a node, in index order, are draws
without replacement from the node's proposal p. Each is accepted with probability min(1, q / p); a rejected one leaves
the residual of q, and p without it. What is committed is distributed as the target's own draws, provided that the
draft's noise serves nothing else and that no child was left out because of which token it is.

Noise: a uniform is made of ids 0 and 1 of one stream, with the committed length at the start of the round as t. Node i
has the coin COIN + 256 i; the draw that ends the round at node i has RESIDUAL + 256 (1 + i), at the root RESIDUAL. A
round commits at least one token and judges a node at most once, so nothing is ever used twice.
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


class Distributions(NamedTuple):
    """Probabilities, and which of their rows belongs where in each draft."""

    values: NDArray[Any]  # [R, V] float32 or float64
    rows: _Ints  # [S, 1 + N] entry 0: after the committed tokens; 1 + i: after node i; -1 where there is none


class RoundKeys(NamedTuple):
    """What keys the noise of each sequence's round."""

    seeds: NDArray[np.uint64]  # [S]
    sample_index: _Ints  # [S]
    committed_len: _Ints  # [S] at the start of the round


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
        q, usable = _probabilities(target, going, nodes[going], target.values.shape[-1])  # [A, V]
        going, q = going[usable], q[usable]
        children, q = _try_children(trees, q, proposal, keys, going, nodes[going])
        ending, moving = children == NO_PARENT, children != NO_PARENT
        bonus_ids[going[ending]] = _draw(q[ending], keys, going[ending], nodes[going[ending]])
        going = going[moving]
        nodes[going] = children[moving]
        for s, node in zip(going.tolist(), nodes[going].tolist(), strict=True):
            paths[s].append(node)
        if not len(going):
            break
    return [Verdict(tuple(path), bonus_id) for path, bonus_id in zip(paths, bonus_ids.tolist(), strict=True)]


def _try_children(
    trees: _Trees, q: _Floats, proposal: Distributions, keys: RoundKeys, sequences: _Ints, nodes: _Ints
) -> tuple[_Ints, _Floats]:
    """The accepted child of each sequence's node, or NO_PARENT; and q as the rejections before it left it. [A], [A, V]

    A child whose p is 0 was not drawn from p: a second copy of a token, or a forged one. It is rejected and passed
    over: to take a residual for it would remove mass that no draw from p ever had the chance to commit.
    """
    p, usable = _probabilities(proposal, sequences, nodes, q.shape[-1])  # [A, V]
    is_child = (trees.parents[sequences] == nodes[:, None]) & usable[:, None]  # [A, N]
    order = np.argsort(~is_child, axis=-1, kind="stable")  # children first, in the order drawn
    num_children = is_child.sum(axis=-1)
    accepted = np.full(len(sequences), NO_PARENT, np.int64)
    for rank in range(num_children.max(initial=0)):
        here = np.flatnonzero((num_children > rank) & (accepted == NO_PARENT))
        child = order[here, rank]
        x = trees.tokens[sequences[here], child]
        p_x, q_x = p[here, x], q[here, x]
        coin = _uniforms(keys, sequences[here], stream(Domain.COIN) + NODE_STRIDE * child)
        is_drawn = p_x > 0
        is_accepted = is_drawn & (coin * p_x < q_x)
        accepted[here[is_accepted]] = child[is_accepted]
        is_rejected = is_drawn & ~is_accepted
        left = here[is_rejected]
        q[left], p[left] = _after_rejection(q[left], p[left], x[is_rejected])
    return accepted, q


def _after_rejection(q: _Floats, p: _Floats, x: _Ints) -> tuple[_Floats, _Floats]:
    """norm(max(q - p, 0)), and p without x, renormalised; one x for each row. [A, V] each

    A residual that is numerically empty leaves q as it is; p with nothing left is all 0.
    """
    residual = np.maximum(q - p, 0.0)
    mass = residual.sum(axis=-1, keepdims=True)
    q = np.where(mass > 0, residual / np.where(mass > 0, mass, 1.0), q)
    p[np.arange(len(x)), x] = 0.0
    mass = p.sum(axis=-1, keepdims=True)
    return q, p / np.where(mass > 0, mass, 1.0)


def _draw(q: _Floats, keys: RoundKeys, sequences: _Ints, nodes: _Ints) -> _Ints:
    """The token that ends each round, by inversion: the first whose cumulative mass exceeds u times the whole. [A]

    u < 1 keeps the product below the whole, and a token without mass never exceeds what the one before it did not.
    """
    u = _uniforms(keys, sequences, stream(Domain.RESIDUAL) + NODE_STRIDE * (1 + nodes))
    cumulative = np.cumsum(q, axis=-1)
    token_ids: _Ints = (cumulative > u[:, None] * cumulative[:, -1:]).argmax(axis=-1)
    return token_ids


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
) -> tuple[_Floats, NDArray[np.bool_]]:
    """The distribution after each sequence's node, in float64 and adding up to 1, and whether it is usable. [A, V], [A]

    Unusable is one that is not there, holds NaN, infinity or a negative number, or is 0 everywhere; it is given as 0.
    """
    rows = distributions.rows[sequences, nodes + 1]
    values = np.zeros((len(rows), vocab_size))
    is_there = rows >= 0
    if is_there.any():
        values[is_there] = distributions.values[rows[is_there]]
    with np.errstate(invalid="ignore"):
        mass = values.sum(axis=-1)
        usable = (values.min(axis=-1) >= 0) & (mass > 0) & np.isfinite(mass)
    values[~usable] = 0.0
    values /= np.where(usable, mass, 1.0)[:, None]
    return values, usable


def _side_by_side(drafts: Sequence[Draft]) -> _Trees:
    shape = len(drafts), max((len(d) for d in drafts), default=0)
    trees = _Trees(np.full(shape, NO_TOKEN, np.int64), np.full(shape, NO_PARENT - 1, np.int64))
    for s, draft in enumerate(drafts):
        trees.tokens[s, : len(draft)] = draft.token_ids
        trees.parents[s, : len(draft)] = draft.parents
    return trees
