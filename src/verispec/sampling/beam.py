"""Which paths a draft beam keeps at each level. Pure functions in float64.

Rule `recursive` wants draws without replacement: stochastic beam search, as a race. Every sequence of tokens arrives at
an exponential time of rate p(sequence); the W first are W draws of whole sequences without replacement. A path's race
time tau is that of its earliest sequence, so the first child inherits its parent's and the others come later: tau_child
= tau_parent + (e_child - min over siblings of e), e = exp(-(phi + log p + g)), with phi the parent's log-probability
and g the child's Gumbel noise. -log tau is the perturbed log-probability G.

Times are kept as logarithms, and the difference of two as log e_child + log(1 - exp(-gap)), gap being how far the
child's log p + g lies below the best sibling's: 1/p never appears, so p(path) may lie far below 1e-300. The sibling
minimum is that of the best child, which is always among those drawn; W children of each path suffice for the W best.

For rule `match` any tree is right, and the best one has the paths that the target most probably goes. The noise is the
target's own, so a path's probability no longer says that: what counts is how far its tokens lie below their siblings.
The target goes to a child about as often as softmax(log p + g) over the children says, and a path is worth the product.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from verispec.sampling.draw import NO_TOKEN, NoisyTopK

_Floats = NDArray[np.float64]
_Ints = NDArray[np.int64]

NOBODY = -1  # in place of a survivor, where there are fewer candidates than the beam is wide


class Paths(NamedTuple):
    """The paths of one level, after any batch axes."""

    phi: _Floats  # [..., P] log-probability of the path
    log_tau: _Floats  # [..., P] logarithm of its race time, or of 1 / the probability that the target goes this way


class Survivors(NamedTuple):
    """The W best candidates of a level, best first, hence siblings in the order drawn; a prefix is a narrower beam.

    Where there are fewer, NOBODY at the end, with phi = -inf and log tau = inf: it has no children.
    """

    parents: _Ints  # [..., W] index among the P paths above
    ranks: _Ints  # [..., W] which of that path's children
    paths: Paths  # [..., W]


def root(*batch: int) -> Paths:
    """The path of no tokens: probability 1, G = 0. Its time only shifts all others, so it may be anything. [..., 1]"""
    return Paths(np.zeros((*batch, 1)), np.zeros((*batch, 1)))


def race_level(paths: Paths, children: NoisyTopK, *, width: int) -> Survivors:
    """The `width` earliest children of P paths, or all there are; `children` is [..., P, k], in the order drawn."""
    exists = _existing(paths, children)
    value = np.where(exists, children.values, 0.0).astype(np.float64)  # [..., P, k]
    gap = np.where(exists, value[..., :1] - value, 0.0)
    phi = np.where(exists, paths.phi[..., None], 0.0)
    with np.errstate(divide="ignore"):  # the best child comes at its parent's time: log 0 = -inf
        log_wait = np.log(-np.expm1(-gap)) - (phi + value)
    return _first(paths, children, exists, np.logaddexp(paths.log_tau[..., None], log_wait), width)


def likely_level(paths: Paths, children: NoisyTopK, *, width: int) -> Survivors:
    """The same for noise that is the target's own: the `width` children that it goes to most probably."""
    exists = _existing(paths, children)
    value = np.where(exists, children.values, 0.0).astype(np.float64)  # [..., P, k]
    gap = np.where(exists, value[..., :1] - value, 0.0)
    shares = np.where(exists, np.exp(-gap), 0.0).sum(axis=-1, keepdims=True)
    log_of_all = np.log(np.where(shares > 0, shares, 1.0))
    return _first(paths, children, exists, paths.log_tau[..., None] + (gap + log_of_all), width)


def greedy_level(paths: Paths, children: NoisyTopK, *, width: int) -> Survivors:
    """The same at temperature 0, where there is no noise: the `width` children of largest cumulative log-softmax."""
    exists = _existing(paths, children)
    logprob = np.where(exists, children.logprobs, 0.0)
    return _first(paths, children, exists, -(paths.phi[..., None] + logprob), width)


Ranking = Callable[..., Survivors]  # of paths and their children, to a width


def ranking(*, is_greedy: bool, by_probability: bool) -> Ranking:
    """What a beam is ranked by, whose draft is judged by probabilities or by what the target draws itself."""
    if is_greedy:
        return greedy_level
    return race_level if by_probability else likely_level


def _existing(paths: Paths, children: NoisyTopK) -> NDArray[np.bool_]:
    exists: NDArray[np.bool_] = (children.token_ids != NO_TOKEN) & np.isfinite(children.values)
    return exists & (paths.log_tau < np.inf)[..., None]


def _first(paths: Paths, children: NoisyTopK, exists: NDArray[np.bool_], log_tau: _Floats, width: int) -> Survivors:
    """The first `width` by time; equal times by parent, then child."""
    # Rounding must not let a child overtake a sibling: a survivor's earlier siblings survive, before it.
    log_tau = np.where(exists, np.maximum.accumulate(log_tau, axis=-1), np.inf)
    phi = np.where(exists, paths.phi[..., None] + children.logprobs, -np.inf)
    *batch, num_paths, k = exists.shape
    flat = (*batch, num_paths * k)
    order = np.argsort(log_tau.reshape(flat), axis=-1, kind="stable")[..., :width]
    kept = Paths(*(np.take_along_axis(a.reshape(flat), order, axis=-1) for a in (phi, log_tau)))
    is_there = kept.log_tau < np.inf
    return Survivors(np.where(is_there, order // k, NOBODY), np.where(is_there, order % k, NOBODY), kept)
