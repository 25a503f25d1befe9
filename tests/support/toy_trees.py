"""Drafting and judging over many toy sequences at once, with the library's noise, beam and acceptance rule.

Target and draft model are Markov chains over a few tokens, so that the probability of every output is known. All
sequences are drafted as arrays; what a test wants to break on purpose it passes in.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from verispec.sampling.beam import Paths, Survivors, race_level, root
from verispec.sampling.draw import NoisyTopK
from verispec.sampling.noise import NODE_STRIDE, Domain, gumbel_f32, philox4x32, stream
from verispec.sampling.recursive import Distributions, RoundKeys, judge_recursive
from verispec.types import NO_PARENT, Draft

Array = NDArray[np.int64]
START = 0  # the token every sequence begins with
PROMPT_LEN = 5
NUM_TOKENS = 3  # of the output that is looked at


class Markov(NamedTuple):
    """Next-token probabilities [V, V] after each token: the target's and the draft model's."""

    q: NDArray[np.float64]
    p: NDArray[np.float64]

    @property
    def vocab_size(self) -> int:
        return self.q.shape[-1]


def softmax(logits: NDArray[np.float64], temperature: float) -> NDArray[np.float64]:
    z = np.exp((logits - logits.max(axis=-1, keepdims=True)) / temperature)
    return z / z.sum(axis=-1, keepdims=True)


def make_markov(vocab_size: int, temperature: float, *, seed: int = 0, likeness: float = 0.5) -> Markov:
    """Random chains; `likeness` is the target's share of the draft model's logits."""
    logits = np.random.default_rng(seed).standard_normal((2, vocab_size, vocab_size))
    return Markov(
        softmax(logits[0], temperature), softmax(likeness * logits[0] + (1 - likeness) * logits[1], temperature)
    )


def output_probabilities(q: NDArray[np.float64], num_tokens: int = NUM_TOKENS) -> NDArray[np.float64]:
    """The probability of each output, in the order of `cells`."""
    joint = q[START]
    for _ in range(num_tokens - 1):
        joint = joint[..., None] * q
    return joint.ravel()


def cells(outputs: Array, vocab_size: int) -> Array:
    """The index of each output [S, n] among all outputs of n tokens."""
    return outputs @ vocab_size ** np.arange(outputs.shape[-1])[::-1]


class Round(NamedTuple):
    """What is known of each sequence when a round begins."""

    seeds: NDArray[np.uint64]  # [S]
    committed_len: Array  # [S]
    last_ids: Array  # [S]


# (round, parent nodes [S, P], the level below them) -> the words of the vocabulary at each parent [S, P, V].
Words = Callable[[Round, Array, int, int], Array]


def words_of(start: Round, t: Array, streams: Array, vocab_size: int) -> Array:
    """The words of the whole vocabulary, four to a block; `t` and `streams` are [S, P]. [S, P, V]"""
    seeds = start.seeds[:, None, None]
    zero = np.zeros((*streams.shape, (vocab_size + 3) // 4), np.int64)
    low, high = (seeds & np.uint64(0xFFFFFFFF)).astype(np.int64), (seeds >> np.uint64(32)).astype(np.int64)
    counter = (zero + np.arange(zero.shape[-1]), zero + t[..., None], zero, zero + streams[..., None])
    words = np.stack(philox4x32(counter, (zero + low, zero + high)), axis=-1)
    return words.reshape(*streams.shape, -1)[..., :vocab_size]


def fresh_words(start: Round, nodes: Array, level: int, vocab_size: int) -> Array:
    """The specified noise of p/q rules: the draft's own domain, one stream for each node of the round."""
    t = start.committed_len[:, None] + 0 * nodes
    return words_of(start, t, stream(Domain.DRAFT) + NODE_STRIDE * (1 + nodes), vocab_size)


def draw_children(p: NDArray[np.float64], tokens: Array, words: Array, k: int) -> NoisyTopK:
    """Gumbel-Top-k after each token, in float32 as backends do it. [S, P, k]"""
    logprobs = np.log(p).astype(np.float32)[tokens]
    values = logprobs + gumbel_f32(np, words)
    ids = np.argsort(-values, axis=-1, kind="stable")[..., :k]
    return NoisyTopK(ids, np.take_along_axis(values, ids, axis=-1), np.take_along_axis(logprobs, ids, axis=-1))


class Beam(NamedTuple):
    """`beam:width,depth`, with the ranking of its candidates."""

    width: int
    depth: int
    rank: Callable[..., Survivors] = race_level

    def num_children(self, level: int) -> int:
        return self.width

    def keep(self, paths: Paths, children: NoisyTopK, level: int) -> Survivors:
        return self.rank(paths, children, width=self.width)


class Branch(NamedTuple):
    """`branch:b1,b2,..`: all children of every node."""

    counts: tuple[int, ...]

    @property
    def depth(self) -> int:
        return len(self.counts)

    def num_children(self, level: int) -> int:
        return self.counts[level]

    def keep(self, paths: Paths, children: NoisyTopK, level: int) -> Survivors:
        num, num_paths, k = children.token_ids.shape
        parents, ranks = np.indices((num_paths, k)).reshape(2, 1, -1)
        zeros = np.zeros((num, num_paths * k))
        return Survivors(np.repeat(parents, num, axis=0), np.repeat(ranks, num, axis=0), Paths(zeros, zeros))


class Trees(NamedTuple):
    """Drafts of one shape, as arrays."""

    tokens: Array  # [S, N]
    parents: Array  # [S, N]


def grow(
    toy: Markov,
    tree: Beam | Branch,
    start: Round,
    *,
    words: Words = fresh_words,
    reorder: Callable[[NoisyTopK], NoisyTopK] = lambda children: children,
) -> Trees:
    """Draft one tree for every sequence."""
    num = len(start.seeds)
    nodes = np.full((num, 1), NO_PARENT)  # the paths' last nodes
    tokens = start.last_ids[:, None]
    paths = root(num)
    all_tokens, all_parents = [], []
    first = 0
    for level in range(tree.depth):
        k = min(tree.num_children(level), toy.vocab_size)
        children = reorder(draw_children(toy.p, tokens, words(start, nodes, level, toy.vocab_size), k))
        kept = tree.keep(paths, children, level)
        tokens = np.take_along_axis(children.token_ids.reshape(num, -1), kept.parents * k + kept.ranks, axis=-1)
        all_tokens.append(tokens)
        all_parents.append(np.take_along_axis(nodes, kept.parents, axis=-1))
        width = tokens.shape[-1]
        nodes = np.repeat(np.arange(first, first + width)[None], num, axis=0)
        paths, first = kept.paths, first + width
    return Trees(np.concatenate(all_tokens, axis=-1), np.concatenate(all_parents, axis=-1))


class Sampled(NamedTuple):
    """What many sequences begin with, and the nodes drafted and accepted on the way."""

    outputs: Array  # [S, NUM_TOKENS]
    drafted: int
    accepted: int


def sample(
    toy: Markov,
    tree: Beam | Branch,
    num: int,
    *,
    first_seed: int = 0,
    grow: Callable[..., Trees] = grow,
    proposal: NDArray[np.float64] | None = None,
) -> Sampled:
    """Rounds of draft and verdict until every sequence has NUM_TOKENS tokens; `proposal` is what the judge takes for p.

    Rows of a Markov chain's matrix are shared by all nodes with one token: `rows` is the token.
    """
    values = [m.astype(np.float32) for m in (toy.q, toy.p if proposal is None else proposal)]
    seeds = np.arange(first_seed, first_seed + num).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    tokens = np.full((num, 1 + NUM_TOKENS + tree.depth), START)  # column 0 stays
    lengths = np.zeros(num, np.int64)
    drafted = accepted = 0
    while len(going := np.flatnonzero(lengths < NUM_TOKENS)):
        start = Round(seeds[going], PROMPT_LEN + lengths[going], tokens[going, lengths[going]])
        trees = grow(toy, tree, start)
        drafts = list(
            map(Draft, zip(*trees.tokens.T.tolist(), strict=True), zip(*trees.parents.T.tolist(), strict=True))
        )
        rows = np.concatenate([start.last_ids[:, None], trees.tokens], axis=-1)
        keys = RoundKeys(start.seeds, np.zeros(len(going), np.int64), start.committed_len)
        verdicts = judge_recursive(drafts, Distributions(values[0], rows), Distributions(values[1], rows), keys)
        path_lens = np.array([len(path) for path, _ in verdicts])
        path_nodes = np.fromiter(itertools.chain.from_iterable(path for path, _ in verdicts), np.int64)
        at = np.repeat(np.arange(len(going)), path_lens)
        depth = np.arange(len(at)) - np.repeat(np.cumsum(path_lens) - path_lens, path_lens)
        tokens[going[at], 1 + lengths[going[at]] + depth] = trees.tokens[at, path_nodes]
        tokens[going, 1 + lengths[going] + path_lens] = [bonus_id for _, bonus_id in verdicts]
        lengths[going] += path_lens + 1
        drafted, accepted = drafted + trees.tokens.size, accepted + len(at)
    return Sampled(tokens[:, 1 : 1 + NUM_TOKENS], drafted, accepted)


def orders_without_replacement(p: NDArray[np.float64], k: int) -> dict[tuple[int, ...], float]:
    """The probability of each ordered outcome of k draws without replacement."""
    found = {}
    for order in itertools.permutations(range(len(p)), k):
        left, probability = 1.0, 1.0
        for i in order:
            probability *= p[i] / left
            left -= p[i]
        found[order] = float(probability)
    return found
