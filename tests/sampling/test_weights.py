"""Sums in sampling: exact in any order, close to float64, and in agreement with what the noise can draw."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.sampling_rows import History, SamplingRowsBuilder
from verispec.sampling.draw import draw, noisy_top_k, probabilities, scaled_logits
from verispec.sampling.maths import exp_f32
from verispec.sampling.noise import MAX_GUMBEL, MIN_GUMBEL
from verispec.sampling.rows import SampleKey, SamplingRows
from verispec.sampling.weights import MAX_VOCAB_SIZE, WEIGHT_BITS, logprobs, totals, weights
from verispec.types import SamplingParams

# z and its weight, to pin exp's polynomial: a change here breaks every receipt.
VECTORS = {
    0.0: 1099511627776,
    -1e-7: 1099511496704,
    -0.5: 666887520256,
    -1.0: 404487733248,
    -13.7: 1234143,
    -25.0: 15,
    -27.0: 2,
    -28.4: 1,
    -28.5: 0,
    -1e30: 0,
    -np.inf: 0,
}


def rows_of(params: SamplingParams, num_rows: int, vocab_size: int) -> SamplingRows:
    builder = SamplingRowsBuilder()
    for t in range(num_rows):
        builder.add(
            params, SampleKey(3, 0), t=t, history=History(frozenset(), {}, 0), path_ids=(), stopping_ids=(),
            vocab_size=vocab_size,
        )  # fmt: skip
    return builder.build()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    z = logits.astype(np.float64) - logits.max()
    return z - np.log(np.exp(z).sum())


def test_weight_vectors() -> None:
    z = np.array([*VECTORS], np.float32)
    assert dict(zip(VECTORS, weights(np, z).tolist(), strict=True)) == VECTORS


def test_exp_is_accurate_and_at_most_one() -> None:
    x = np.linspace(-87, 0, 200_001).astype(np.float32)
    found, exact = exp_f32(np, x), np.exp(x.astype(np.float64))
    assert (np.abs(found - exact) / exact).max() < 1e-7
    assert found.max() == 1.0
    assert exp_f32(np, np.array([-87.5, -1e30, -np.inf], np.float32)).tolist() == [0, 0, 0]


def test_the_largest_vocabulary_fits() -> None:
    assert MAX_VOCAB_SIZE * 2**WEIGHT_BITS < 2**63
    assert totals(np, np.zeros((1, MAX_VOCAB_SIZE), np.float32)).log_total[0] == np.float32(22 * np.log(2))


@pytest.mark.parametrize("vocab_size", [1, 2, 1000, 151936, 2**20])
@pytest.mark.parametrize("kind", ["random", "wide", "flat", "nearly flat", "peaked"])
def test_logprobs_are_those_of_float64(vocab_size: int, kind: str) -> None:
    """Within 1e-6 down to -8, below which float32 itself gets coarser: 1.5 units of its last place."""
    rng = np.random.default_rng(vocab_size)
    row = {
        "random": rng.standard_normal(vocab_size),
        "wide": 20 + 6 * rng.standard_normal(vocab_size),
        "flat": np.full(vocab_size, -3.7),
        "nearly flat": 0.1 * rng.random(vocab_size),
        "peaked": np.where(np.arange(vocab_size) == vocab_size // 2, 30, rng.standard_normal(vocab_size)),
    }[kind].astype(np.float32)
    exact = log_softmax(row)
    error = np.abs(logprobs(row[None], totals(np, row[None]))[0] - exact)
    assert error[exact > -8].max(initial=0.0) < 1e-6
    assert (error < np.maximum(1e-6, 1.5 * np.spacing(np.abs(exact).astype(np.float32)))).all()


def test_order_changes_no_bit() -> None:
    """Control: a plain float32 sum of the same values does depend on it."""
    rng = np.random.default_rng(0)
    row = (2 * rng.standard_normal(50_000)).astype(np.float32)
    orders = [rng.permutation(len(row)) for _ in range(20)]
    assert len({totals(np, row[order][None]).log_total.tobytes() for order in orders}) == 1
    assert len({np.exp(row[order]).sum(dtype=np.float32).tobytes() for order in orders}) > 1


def test_a_token_of_weight_0_is_never_drawn() -> None:
    """The best token has z = 0 and at least the least noise, so z + the largest noise must reach that to win."""
    drawable = np.linspace(MIN_GUMBEL - MAX_GUMBEL, 0, 10_000).astype(np.float32)
    assert weights(np, drawable).min() > 0


def test_top_p_never_keeps_a_token_of_weight_0() -> None:
    """With top_p just below 1 all tokens of positive weight may be needed, and none of weight 0."""
    row = np.array([[0.0, -40.0, -1.0, -28.3, -50.0]], np.float32)
    for top_p in (np.nextafter(np.float32(1), np.float32(0)), 0.5):
        z = scaled_logits(np, row, rows_of(SamplingParams(temperature=1.0, top_p=float(top_p)), 1, 5))
        assert (weights(np, z)[z > -np.inf] > 0).all()


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, 2), (0.5000001, 3), (0.75, 3), (0.9, 4), (1e-6, 1)])
def test_top_p_keeps_the_shortest_prefix_that_reaches_the_share(top_p: float, kept: int) -> None:
    """Of four equal tokens two weigh exactly half, so 0.5 takes two and anything above three; the smallest ids."""
    row = np.array([[-60.0, 1.0, 1.0, 1.0, 1.0]], np.float32)
    z = scaled_logits(np, row, rows_of(SamplingParams(temperature=1.0, top_p=top_p), 1, 5))
    assert np.flatnonzero(z[0] > -np.inf).tolist() == [1, 2, 3, 4][:kept]


def test_top_p_is_a_share_of_what_min_p_and_top_k_left() -> None:
    row = np.log(np.array([[0.4, 0.2, 0.2, 0.1, 0.1]])).astype(np.float32)
    z = scaled_logits(np, row, rows_of(SamplingParams(temperature=1.0, top_k=2, top_p=0.6), 1, 5))
    assert np.flatnonzero(z[0] > -np.inf).tolist() == [0]  # 0.4 of 0.6, where it would be 0.4 of 1


def test_what_is_left_of_a_proposal_is_what_its_tail_is_drawn_from() -> None:
    """Rules by probabilities go on with p without the rejected child: a tail far below 2^-40 must keep its proportions.

    Control: weights, which are rounded, do not.
    """
    row = np.array([[0.0, -26.0, -26.5, -27.2, -29.0]], np.float32)
    exact = np.exp(row[0, 1:].astype(np.float64))
    exact /= exact.sum()

    def error(p: np.ndarray) -> float:
        return float(np.abs(p[1:] / p[1:].sum() / exact - 1).max())

    p = probabilities(np, row, rows_of(SamplingParams(temperature=1.0), 1, 5))[0].astype(np.float64)
    assert error(p) < 1e-6
    assert error(weights(np, row)[0].astype(np.float64)) > 0.1


def test_children_are_offered_with_the_logprobs_of_their_distribution() -> None:
    """Also where their weight is 0: log p is z less the logarithm of the sum, not the logarithm of a rounded weight."""
    row = np.array([[3.0, -40.0, 2.0]], np.float32)
    ids, _, log_p = noisy_top_k(np, row, rows_of(SamplingParams(temperature=1.0), 1, 3), 3)
    assert np.abs(log_p[0] - log_softmax(row[0])[ids[0]]).max() < 2e-6


def test_one_token_of_probability_one() -> None:
    row = np.full((1, 7), -np.inf, np.float32)
    row[0, 5] = -2.0
    for params in (SamplingParams(), SamplingParams(temperature=1.0, top_p=0.3, min_p=0.2, top_k=3)):
        token_ids, found = draw(np, row, rows_of(params, 1, 7))
        assert (token_ids[0], found[0]) == (5, 0.0)
