"""The noise is exactly what is specified: known answers, bounded tails, the right distribution, order-free."""

from __future__ import annotations

import math

import numpy as np
import pytest

from verispec.sampling.maths import log_f32
from verispec.sampling.noise import (
    MAX_GUMBEL,
    MIN_GUMBEL,
    Domain,
    gumbel_f32,
    noise_words,
    philox4x32,
    split_seed,
    stream,
    uniform_f32,
    vocabulary_words,
)

# Philox4x32-10 known answers, published with the generator: counter, key, result.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]

# Our own vectors: (seed, t, sample index, domain, node, id) -> word and the bits of its Gumbel value.
# They pin the counter's layout and the logarithm; a change here breaks every receipt.
VECTORS = [
    ((0, 0, 0, Domain.TOKEN, 0, 0), 0x6627E8D5, 0x3F2CC257),
    ((1, 5, 0, Domain.TOKEN, 0, 7), 0xC53AFCF0, 0xBEC5CB85),
    ((2**64 - 1, 8191, 3, Domain.TOKEN, 0, 49151), 0x21686A8E, 0x3FFBCFE7),
    ((123456789, 17, 0, Domain.COIN, 2, 5), 0x2F576222, 0x3FCB2C85),
    ((987654321987654321, 100, 1, Domain.DRAFT, 9, 1000), 0x456E938E, 0x3F934DA5),
]


def word(seed: int, t: int, sample_index: int, domain: Domain, node: int, token_id: int) -> int:
    low, high = split_seed(seed)
    ids = np.array([token_id], np.int64)
    return int(
        noise_words(ids, seed_low=low, seed_high=high, t=t, sample_index=sample_index, stream=stream(domain, node))[0]
    )


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    arrays = tuple(np.array([c], np.int64) for c in counter)
    keys = tuple(np.array([k], np.int64) for k in key)
    assert tuple(int(w[0]) for w in philox4x32(arrays, keys)) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(("arguments", "expected_word", "expected_bits"), VECTORS)
def test_noise_vectors(
    arguments: tuple[int, int, int, Domain, int, int], expected_word: int, expected_bits: int
) -> None:
    found = word(*arguments)
    gumbel = gumbel_f32(np, np.array([found], np.int64))
    assert (hex(found), hex(int(gumbel.view(np.uint32)[0]))) == (hex(expected_word), hex(expected_bits))


def test_every_argument_changes_the_noise() -> None:
    base = (5, 10, 0, Domain.TOKEN, 0, 100)
    changed = [
        (6, 10, 0, Domain.TOKEN, 0, 100),
        (5 + 2**32, 10, 0, Domain.TOKEN, 0, 100),
        (5, 11, 0, Domain.TOKEN, 0, 100),
        (5, 10, 1, Domain.TOKEN, 0, 100),
        (5, 10, 0, Domain.COIN, 0, 100),
        (5, 10, 0, Domain.DRAFT, 0, 100),
        (5, 10, 0, Domain.TOKEN, 1, 100),
        (5, 10, 0, Domain.TOKEN, 0, 101),
        (5, 10, 0, Domain.TOKEN, 0, 104),
    ]
    assert len({word(*arguments) for arguments in (base, *changed)}) == len(changed) + 1


def test_the_whole_vocabulary_equals_single_ids() -> None:
    """One pass over blocks of four gives what each id gives alone, at every vocabulary size modulo 4."""
    for vocab_size in (1, 2, 3, 4, 5, 1001):
        words = vocabulary_words(np, vocab_size, seed_low=3, seed_high=2**8, t=9, sample_index=2)
        assert words.tolist() == [word(2**40 + 3, 9, 2, Domain.TOKEN, 0, i) for i in range(vocab_size)]


def test_the_tails_are_finite_and_not_cut() -> None:
    extremes = np.array([0, 1, 2, 2**31, 2**32 - 2, 2**32 - 1], np.int64)
    u = uniform_f32(np, extremes)
    assert (u > 0).all()
    assert (u < 1).all()
    g = gumbel_f32(np, extremes)
    assert np.isfinite(g).all()
    assert 22.8 < g[0] <= MAX_GUMBEL  # not cut at 16.6
    assert MIN_GUMBEL <= g[-1] == pytest.approx(-math.log(24 * math.log(2)), abs=1e-5)
    assert (np.diff(g) <= 0).all()


def test_the_logarithm_is_accurate() -> None:
    exponents = np.random.default_rng(0).uniform(-34, 5, 200_000)
    x = (2.0**exponents).astype(np.float32)
    exact = np.log(x.astype(np.float64))
    error = np.abs(log_f32(np, x) - exact) / np.spacing(np.abs(exact).astype(np.float32))
    assert error.max() < 2.0
    assert log_f32(np, np.float32([1.0]))[0] == 0.0


def test_gumbel_against_float64() -> None:
    words = np.random.default_rng(1).integers(0, 2**32, 200_000)
    u = np.minimum((words.astype(np.float32) + np.float32(0.5)).astype(np.float64) * 2.0**-32, 1 - 2.0**-24)
    exact = -np.log(-np.log1p(-u))
    assert np.abs(gumbel_f32(np, words) - exact).max() < 1e-5


def chi_square_p(observed: np.ndarray, expected: np.ndarray) -> float:
    """Upper tail of the chi-square distribution, by Wilson and Hilferty's normal approximation."""
    statistic = float(((observed - expected) ** 2 / expected).sum())
    k = len(observed) - 1
    z = ((statistic / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k))
    return 0.5 * math.erfc(z / math.sqrt(2))


def draw_counts(p: np.ndarray, num_draws: int, *, reuse_noise: bool = False) -> np.ndarray:
    t = np.arange(num_draws)
    if reuse_noise:
        t[::20] = 0
    words = vocabulary_words(np, len(p), seed_low=42, seed_high=0, t=t[:, None], sample_index=0)
    drawn = np.argmax(np.log(p).astype(np.float32) + gumbel_f32(np, words), axis=-1)
    return np.bincount(drawn, minlength=len(p))


def test_gumbel_argmax_samples_the_distribution() -> None:
    """Chi-square over 20,000 draws; the control reuses one position's noise now and then and must be rejected."""
    p = np.array([0.4, 0.25, 0.15, 0.1, 0.06, 0.03, 0.01])
    num_draws = 20_000
    assert chi_square_p(draw_counts(p, num_draws), p * num_draws) > 1e-4
    assert chi_square_p(draw_counts(p, num_draws, reuse_noise=True), p * num_draws) < 1e-6


def test_every_operation_is_rounded_once() -> None:
    """The noise is what its definition gives, operation by operation; the last division done by a reciprocal changes
    three words."""
    words, one = np.arange(1 << 16), np.float32(1)
    u = uniform_f32(np, words)
    w = one - u
    lost = (w - one) + u

    def differing(quotient: np.ndarray) -> list[int]:
        noise = -log_f32(np, -(log_f32(np, w) - quotient))
        return np.flatnonzero(noise.view(np.int32) != gumbel_f32(np, words).view(np.int32)).tolist()

    assert differing(lost / w) == []
    assert differing(lost * (one / w)) == [129, 130, 142]
