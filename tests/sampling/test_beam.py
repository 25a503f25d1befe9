"""A stochastic beam draws whole sequences without replacement; its ranking against the published formula and a race.

Exact probabilities come from enumeration. Each control breaks one thing and must be rejected by the same test.
"""

from __future__ import annotations

import decimal
import itertools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support import toy_trees
from tests.support.chi_square import chi_square_p
from tests.support.sampling_rows import History, SamplingRowsBuilder
from tests.support.toy_trees import (
    START,
    Beam,
    Markov,
    Round,
    draw_children,
    fresh_words,
    make_markov,
    orders_without_replacement,
    output_probabilities,
)
from verispec.sampling.beam import NOBODY, Paths, Survivors, greedy_level, likely_level, race_level, ranking, root
from verispec.sampling.draw import NO_TOKEN, NoisyTopK, noisy_top_k
from verispec.sampling.noise import Domain, stream
from verispec.sampling.rows import SampleKey
from verispec.types import NO_PARENT, SamplingParams

NUM_DRAWS = 100_000
LIMIT = 1e-6  # below, a p-value rejects
FAR = 5.5  # standard deviations: about 4e-8


def beginning(num: int) -> Round:
    return Round(np.arange(num).astype(np.uint64) * np.uint64(2**33 + 1), np.full(num, 9), np.full(num, START))


# --- Gumbel-Top-k: one node ---


def order_p_value(ids: NDArray[np.int64], p: NDArray[np.float64]) -> float:
    """Chi-square of ordered outcomes [S, k] against sequential draws without replacement."""
    expected = orders_without_replacement(p, ids.shape[-1])
    cell = {order: i for i, order in enumerate(expected)}
    counts = np.bincount([cell[tuple(row)] for row in ids.tolist()], minlength=len(cell))
    return chi_square_p(counts, np.array(list(expected.values())))


P = np.array([0.4, 0.25, 0.2, 0.1, 0.05])


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_the_largest_of_log_p_plus_noise_are_draws_without_replacement(k: int) -> None:
    start = beginning(NUM_DRAWS)
    words = fresh_words(start, np.full((NUM_DRAWS, 1), NO_PARENT), 0, len(P))
    ids = draw_children(P[None], np.zeros((NUM_DRAWS, 1), np.int64), words, k).token_ids[:, 0]
    assert order_p_value(ids, P) > LIMIT


def test_control_one_word_for_four_ids() -> None:
    """Ids that share a Philox block must not share its word."""
    start = beginning(NUM_DRAWS)
    words = fresh_words(start, np.full((NUM_DRAWS, 1), NO_PARENT), 0, len(P))[..., [0, 0, 0, 0, 4]]
    ids = draw_children(P[None], np.zeros((NUM_DRAWS, 1), np.int64), words, 3).token_ids[:, 0]
    assert order_p_value(ids, P) < LIMIT


def production_children(logits: NDArray[np.float32], seeds: list[int], k: int, *, node: int) -> NoisyTopK:
    builder = SamplingRowsBuilder()
    for seed in seeds:
        builder.add(
            SamplingParams(temperature=1.0), SampleKey(seed, 0), t=9, history=History(frozenset(), {}, 0), path_ids=(),
            stopping_ids=(), vocab_size=logits.shape[-1], stream=stream(Domain.DRAFT, 1 + node),
        )  # fmt: skip
    return noisy_top_k(np, logits, builder.build(), k)


def test_what_backends_draw_are_draws_without_replacement() -> None:
    num = 10_000
    logits = np.repeat(np.log(P).astype(np.float32)[None], num, axis=0)
    assert order_p_value(production_children(logits, list(range(num)), 3, node=NO_PARENT).token_ids, P) > LIMIT


def test_the_toys_draw_what_backends_draw() -> None:
    toy = make_markov(7, 1.0)
    start = beginning(50)
    tokens = np.arange(50)[:, None] % 7
    found = draw_children(toy.p, tokens, fresh_words(start, np.full((50, 1), 4), 1, 7), 3)
    logits = (np.log(toy.p)[tokens[:, 0]] + 3.0).astype(np.float32)
    expected = production_children(logits, start.seeds.tolist(), 3, node=4)
    assert found.token_ids[:, 0].tolist() == expected.token_ids.tolist()
    assert np.allclose(found.values[:, 0], expected.values, atol=1e-5)
    assert np.allclose(found.logprobs[:, 0], expected.logprobs, atol=1e-5)


# --- The beam: sequences without replacement ---


def drawn_sequences(toy: Markov, beam: Beam, num: int, **broken: Any) -> NDArray[np.int64]:
    """The last level's sequences, as indices among all of them, best first. [S, W]"""
    trees = toy_trees.grow(toy, beam, beginning(num), **broken)
    nodes = np.repeat(np.arange(trees.tokens.shape[-1])[None, -beam.width :], num, axis=0)
    found = 0 * nodes
    for level in range(beam.depth):
        found += np.take_along_axis(trees.tokens, nodes, axis=-1) * toy.vocab_size**level
        nodes = np.take_along_axis(trees.parents, nodes, axis=-1)
    return found


def inclusion_z(drawn: NDArray[np.int64], p: NDArray[np.float64]) -> NDArray[np.float64]:
    """How far each sequence's number of inclusions lies from its expectation, in standard deviations."""
    inclusion = np.zeros(len(p))
    for order, probability in orders_without_replacement(p, drawn.shape[-1]).items():
        inclusion[list(order)] += probability
    num = len(drawn)
    return (np.bincount(drawn.ravel(), minlength=len(p)) - num * inclusion) / np.sqrt(num * inclusion * (1 - inclusion))


BEAMS = [Beam(2, 2), Beam(3, 2), Beam(3, 3)]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("beam", BEAMS, ids=lambda b: f"beam:{b.width},{b.depth}")
def test_a_beam_draws_sequences_without_replacement(beam: Beam, temperature: float) -> None:
    """Joint over the ordered outcome, and each sequence's inclusion."""
    toy = make_markov(3, temperature, seed=1)
    p = output_probabilities(toy.p, beam.depth)
    drawn = drawn_sequences(toy, beam, NUM_DRAWS)
    assert order_p_value(drawn, p) > LIMIT
    assert np.abs(inclusion_z(drawn, p)).max() < FAR


def by_raw_sums(paths: Paths, children: NoisyTopK, *, width: int) -> Survivors:
    """The sum of log p + g along the path: noise adds up, and deep paths win by it."""
    return greedy_level(paths, children._replace(logprobs=children.values), width=width)


@pytest.mark.parametrize("rank", [by_raw_sums, greedy_level])
@pytest.mark.parametrize("shape", [(2, 2), (3, 3)])
def test_control_a_beam_ranked_in_another_way(shape: tuple[int, int], rank: Any) -> None:
    toy = make_markov(3, 1.0, seed=1)
    p = output_probabilities(toy.p, shape[1])
    drawn = drawn_sequences(toy, Beam(*shape, rank), NUM_DRAWS)
    assert order_p_value(drawn, p) < LIMIT
    assert np.abs(inclusion_z(drawn, p)).max() > FAR


# --- The ranking itself, on given noise ---


def published_g(phi: Any, g_parent: Any, values: Any) -> NDArray[np.float64]:
    """G of each child by the formula of stochastic beam search: the children's maximum conditioned to the parent's."""
    g = phi[..., None] + values
    z = g.max(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        v = g_parent[..., None] - g + np.log1p(-np.exp(g - z))
    return g_parent[..., None] - np.maximum(0.0, v) - np.log1p(np.exp(-np.abs(v)))


def random_children(rng: np.random.Generator, shape: tuple[int, ...], vocab_size: int) -> NoisyTopK:
    """The whole vocabulary as children of each path, in the order drawn; float64 so that formulas can be compared."""
    logprobs = np.log(rng.dirichlet(np.full(vocab_size, 0.5), shape))
    return in_order_drawn(logprobs, logprobs + rng.gumbel(size=(*shape, vocab_size)))


def in_order_drawn(logprobs: NDArray[np.float64], values: NDArray[np.float64]) -> NoisyTopK:
    ids = np.argsort(-values, axis=-1, kind="stable")
    return NoisyTopK(ids, np.take_along_axis(values, ids, axis=-1), np.take_along_axis(logprobs, ids, axis=-1))


def test_the_race_equals_the_published_formula() -> None:
    """Level by level, and the plain race in linear time as well where that can be represented."""
    rng = np.random.default_rng(7)
    paths, tau = root(200), np.ones((200, 1))
    for _ in range(4):
        children = random_children(rng, paths.phi.shape, 6)
        g = published_g(paths.phi, -paths.log_tau, children.values).reshape(200, -1)
        e = np.exp(-(paths.phi[..., None] + children.values))
        linear = (tau[..., None] + e - e.min(axis=-1, keepdims=True)).reshape(200, -1)
        kept = race_level(paths, children, width=4)
        at = kept.parents * 6 + kept.ranks
        assert np.abs(-kept.paths.log_tau - np.take_along_axis(g, at, axis=-1)).max() < 1e-9
        assert np.abs(np.exp(kept.paths.log_tau) / np.take_along_axis(linear, at, axis=-1) - 1).max() < 1e-9
        assert (np.sort(at, axis=-1) == np.sort(np.argsort(-g, axis=-1)[:, :4], axis=-1)).all()
        paths, tau = kept.paths, np.take_along_axis(linear, at, axis=-1)


@pytest.mark.parametrize("log_p", [-700.0, -5000.0])
def test_improbable_paths_are_ranked_exactly(log_p: float) -> None:
    """Times around 1e300 and far beyond float64, against 60 digits."""
    rng = np.random.default_rng(8)
    with decimal.localcontext(prec=60):
        phi = log_p + rng.uniform(-3, 3, 5)
        paths = Paths(phi, -phi + rng.uniform(-2, 2, 5))
        children = random_children(rng, (5,), 4)
        kept = race_level(paths, children, width=20)
        for parent, rank, log_tau in zip(kept.parents, kept.ranks, kept.paths.log_tau, strict=True):
            e = [
                (-(decimal.Decimal(float(phi[parent])) + decimal.Decimal(float(v)))).exp()
                for v in children.values[parent]
            ]
            exact = (decimal.Decimal(float(paths.log_tau[parent])).exp() + e[rank] - min(e)).ln()
            assert abs(float(exact) - log_tau) < 1e-9
    assert (np.diff(kept.paths.log_tau) >= 0).all()


@pytest.mark.parametrize("shared", [False, True], ids=["own noise", "one noise for a level"])
def test_as_many_children_as_the_beam_is_wide_suffice(shared: bool) -> None:
    """The beam of width W over W children each is the W first of all sequences, whose noise is all drawn.

    Also with one noise vector for a level.
    """
    num, vocab_size, depth, width = 300, 4, 3, 3
    rng = np.random.default_rng(9)
    logits = rng.standard_normal((vocab_size, vocab_size))
    logp = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    noise = [rng.gumbel(size=(num, 1 if shared else vocab_size**level, vocab_size)) for level in range(depth)]

    def best(k: int, kept_width: int) -> NDArray[np.int64]:
        paths, sequences = root(num), np.zeros((num, 1), np.int64)
        for level in range(depth):
            # Noise by prefix: the same whichever paths are kept beside it.
            g = np.take_along_axis(noise[level], (0 * sequences if shared else sequences)[..., None], axis=1)
            last = sequences % vocab_size
            children = in_order_drawn(logp[last], logp[last] + g)
            kept = race_level(paths, NoisyTopK(*(array[..., :k] for array in children)), width=kept_width)
            ids = np.take_along_axis(children.token_ids[..., :k].reshape(num, -1), kept.parents * k + kept.ranks, -1)
            sequences = np.take_along_axis(sequences, kept.parents, -1) * vocab_size + ids
            paths = kept.paths
        return sequences[:, :width]

    assert (best(width, width) == best(vocab_size, vocab_size**depth)).all()


def test_temperature_0_ranks_by_cumulative_log_softmax() -> None:
    rng = np.random.default_rng(10)
    logp = np.log(rng.dirichlet(np.ones(4), (3, 5, 4)))  # another chain at every level: no two sequences are equal
    paths, sequences = root(5), np.zeros((5, 1), np.int64)
    for level in range(3):
        rows = np.take_along_axis(logp[level], (sequences % 4)[..., None], axis=1)
        children = in_order_drawn(rows, rows)
        kept = greedy_level(paths, children, width=64)
        ids = np.take_along_axis(children.token_ids.reshape(5, -1), kept.parents * 4 + kept.ranks, -1)
        sequences = np.take_along_axis(sequences, kept.parents, -1) * 4 + ids
        paths = kept.paths
    for s in range(5):
        score = {
            sum(t * 4 ** (2 - i) for i, t in enumerate(tokens)): sum(
                logp[level, s, before, t] for level, (before, t) in enumerate(itertools.pairwise((0, *tokens)))
            )
            for tokens in itertools.product(range(4), repeat=3)
        }
        assert sequences[s].tolist() == sorted(score, key=lambda i: -score[i])
        assert np.allclose(paths.phi[s], sorted(score.values(), reverse=True))


def test_with_the_targets_noise_paths_rank_by_shares_among_siblings() -> None:
    """The product of softmax(log p + g) along the path, children that a filter left out aside."""
    rng = np.random.default_rng(12)
    paths, shares = root(50), np.ones((50, 1))
    for _ in range(3):
        children = random_children(rng, paths.phi.shape, 5)
        children.token_ids[..., 4] = NO_TOKEN
        e = np.exp(children.values[..., :4])
        worth = np.pad(shares[..., None] * e / e.sum(-1, keepdims=True), ((0, 0), (0, 0), (0, 1))).reshape(50, -1)
        kept = likely_level(paths, children, width=6)
        there = kept.parents != NOBODY
        at = np.where(there, kept.parents * 5 + kept.ranks, 0)
        expected = -np.sort(-worth, axis=-1)[:, :6]
        assert np.allclose(np.where(there, np.take_along_axis(worth, at, axis=-1), 0.0), expected)
        assert np.allclose(np.exp(-kept.paths.log_tau), expected)
        paths, shares = kept.paths, expected


def levels_reached(
    rank: Any, *, width: int, num: int = 4000, depth: int = 4, vocab_size: int = 12
) -> NDArray[np.int64]:
    """Of a beam, by a target whose logits are near the draft's and whose noise is the same."""
    rng = np.random.default_rng(9)
    logits = 1.5 * rng.standard_normal((vocab_size, vocab_size))
    logp = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    target = logits + 0.7 * rng.standard_normal(logits.shape)
    paths, sequences, gone = root(num), np.zeros((num, 1), np.int64), np.zeros(num, np.int64)
    is_inside, found = np.ones(num, bool), np.zeros(num, np.int64)
    for _ in range(depth):
        noise, last = rng.gumbel(size=(num, vocab_size)), sequences % vocab_size
        drawn = in_order_drawn(logp[last], logp[last] + noise[:, None])
        kept = rank(paths, NoisyTopK(*(array[..., :width] for array in drawn)), width=width)
        ids = np.take_along_axis(drawn.token_ids[..., :width].reshape(num, -1), kept.parents * width + kept.ranks, -1)
        sequences, paths = np.take_along_axis(sequences, kept.parents, -1) * vocab_size + ids, kept.paths
        gone = gone * vocab_size + (target[gone % vocab_size] + noise).argmax(axis=-1)
        is_inside &= (sequences == gone[:, None]).any(axis=-1)
        found += is_inside
    return found


@pytest.mark.parametrize("width", [3, 4])
def test_the_target_goes_further_along_likely_paths_than_along_a_race(width: int) -> None:
    """And, the control, less far along those that are probable without the noise."""
    race = levels_reached(race_level, width=width)
    for rank, sign in ((likely_level, 1), (greedy_level, -1)):
        more = sign * (levels_reached(rank, width=width) - race)
        assert more.mean() / (more.std() / np.sqrt(len(more))) > FAR


def test_who_judges_decides_how_a_beam_is_ranked() -> None:
    assert ranking(is_greedy=False, by_probability=False) is likely_level
    assert ranking(is_greedy=False, by_probability=True) is race_level  # draws without replacement
    assert {ranking(is_greedy=True, by_probability=each) for each in (False, True)} == {greedy_level}


def test_siblings_stay_in_the_order_drawn() -> None:
    """Values that differ by the last bit, where rounded times are not always in order; nor may one be left out."""
    rng = np.random.default_rng(11)
    num, num_paths = 50_000, 3
    best, second = rng.uniform(1, 5, (num, num_paths, 1)), rng.uniform(0.2, 0.5, (num, num_paths, 1))
    values = np.concatenate([best, second - np.arange(5) * 2.0**-54], axis=-1)
    children = NoisyTopK(np.broadcast_to(np.arange(6), values.shape), values, np.full(values.shape, -1.5))
    paths = Paths(rng.uniform(-1, 0, (num, num_paths)), rng.uniform(-1.5, 0, (num, num_paths)))
    kept = race_level(paths, children, width=8)
    for parent in range(num_paths):
        mine = kept.parents == parent
        assert (kept.ranks[mine] == (np.cumsum(mine, axis=-1) - 1)[mine]).all()


@pytest.mark.parametrize("level", [race_level, likely_level, greedy_level])
def test_equal_times_go_by_parent_then_child(level: Any) -> None:
    same = np.full((20, 3), -0.5, np.float32)
    kept = level(Paths(np.full(20, -1.0), np.full(20, 1.0)), NoisyTopK(0 * same, same, same), width=50)
    assert (3 * kept.parents + kept.ranks).tolist() == list(range(50))


@pytest.mark.parametrize("level", [race_level, likely_level, greedy_level])
@pytest.mark.parametrize("padding", [-np.inf, np.nan])
def test_missing_children_and_missing_paths_are_nobody(level: Any, padding: float) -> None:
    """A filter left one child of the first path and none of the second; the third path is itself nobody."""
    ids = np.array([[7, NO_TOKEN], [NO_TOKEN, NO_TOKEN], [5, 6]])
    values = np.array([[-0.1, padding], [padding, padding], [-0.1, -0.2]], np.float32)
    paths = Paths(np.array([-1.0, -1.0, -np.inf]), np.array([1.0, 0.5, np.inf]))
    kept = level(paths, NoisyTopK(ids, values, values), width=3)
    assert kept.parents.tolist() == [0, NOBODY, NOBODY]
    assert kept.ranks.tolist() == [0, NOBODY, NOBODY]
    assert kept.paths.phi.tolist() == [pytest.approx(-1.1), -np.inf, -np.inf]
    assert kept.paths.log_tau[1:].tolist() == [np.inf, np.inf]


def test_fewer_candidates_than_the_beam_is_wide() -> None:
    values = np.array([[-0.1, -0.2]], np.float32)
    kept = race_level(root(), NoisyTopK(np.array([[3, 4]]), values, values), width=5)
    assert kept.ranks.tolist() == [0, 1]
    assert kept.paths.log_tau[0] == 0.0  # the best child comes when its parent does
