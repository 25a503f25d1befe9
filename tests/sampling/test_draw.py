"""Logit processing against an obvious reference, one row at a time in Python; and what a row must not depend on."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.sampling_rows import History, SamplingRowsBuilder
from tests.support.scale import scaled
from verispec.sampling.draw import (
    NO_TOKEN,
    draw,
    logprobs_of,
    noisy_top_k,
    probabilities,
    process,
    scaled_logits,
    top_logprobs,
)
from verispec.sampling.noise import gumbel_f32, split_seed, vocabulary_words
from verispec.sampling.rows import SampleKey, SamplingRows
from verispec.types import SamplingParams

VOCAB = 24


def build(params: SamplingParams, *, num_rows: int = 1, t: int = 3, seed: int = 9, **history: object) -> SamplingRows:
    builder = SamplingRowsBuilder()
    for row in range(num_rows):
        builder.add(
            params,
            SampleKey(seed, 0),
            t=t + row,
            history=History(
                frozenset(history.get("prompt", ())),  # type: ignore[arg-type]
                Counter(history.get("output", ())),  # type: ignore[arg-type]
                len(history.get("output", ())),  # type: ignore[arg-type]
            ),
            path_ids=history.get("path", ()),  # type: ignore[arg-type]
            stopping_ids=history.get("stopping", ()),  # type: ignore[arg-type]
            vocab_size=VOCAB,
        )
    return builder.build()


def words_of(vocab_size: int, *, seed: int, t: int) -> np.ndarray:
    low, high = split_seed(seed)
    return vocabulary_words(np, vocab_size, seed_low=low, seed_high=high, t=t, sample_index=0)  # type: ignore[no-any-return]


def reference_kept(logits: list[float], params: SamplingParams) -> list[int]:
    """Ids that survive the filters, by sorting and adding up in Python."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    scaled = [(logits[i] - logits[order[0]]) / params.temperature for i in order]
    kept = [i for i, z in zip(order, scaled, strict=True) if params.min_p == 0 or z >= math.log(params.min_p) - 1e-7]
    if params.top_k:
        kept = kept[: params.top_k]
    if params.top_p < 1:
        weights = [math.exp((logits[i] - logits[order[0]]) / params.temperature) for i in kept]
        total, before, count = sum(weights), 0.0, 0
        for weight in weights:
            if before >= params.top_p * total:
                break
            before += weight
            count += 1
        kept = kept[: max(1, count)]
    return kept


# Logits on a grid of 1/8: ties are common, and sums are far from rounding trouble.
LOGITS = st.lists(st.integers(-40, 40).map(lambda i: i / 8), min_size=VOCAB, max_size=VOCAB)


@settings(max_examples=scaled(300), deadline=None)
@given(
    logits=LOGITS,
    top_k=st.sampled_from([0, 1, 3, 10, 100]),
    top_p=st.sampled_from([1.0, 0.05, 0.437, 0.913]),
    min_p=st.sampled_from([0.0, 0.013, 0.3, 1.0]),
    temperature=st.sampled_from([0.25, 1.0, 2.0]),
)
def test_filters_keep_what_the_reference_keeps(
    logits: list[float], top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    array = np.array([logits], np.float32)
    z = scaled_logits(np, array, build(params))
    assert np.flatnonzero(z[0] > -np.inf).tolist() == sorted(reference_kept(logits, params))


def test_the_draw_is_argmax_of_scaled_logits_plus_noise() -> None:
    logits = np.random.default_rng(0).standard_normal((5, VOCAB)).astype(np.float32)
    rows = build(SamplingParams(temperature=0.7), num_rows=5, t=11, seed=2**50)
    for row, token_id in enumerate(draw(np, logits, rows).token_ids):
        g = gumbel_f32(np, words_of(VOCAB, seed=2**50, t=11 + row))
        z = (logits[row] - logits[row].max()) / np.float32(0.7)
        assert token_id == int(np.argmax(z + g))


def test_sparse_and_dense_noise_agree() -> None:
    """Few survivors take another path to the noise; the draw among them is the same."""
    logits = np.random.default_rng(1).standard_normal((64, 4096)).astype(np.float32)
    params = SamplingParams(temperature=1.0, top_k=40)
    builder = SamplingRowsBuilder()
    for t in range(64):
        builder.add(
            params, SampleKey(5, 0), t=t, history=History(frozenset(), {}, 0), path_ids=(), stopping_ids=(),
            vocab_size=4096,
        )  # fmt: skip
    rows = builder.build()
    z = scaled_logits(np, logits, rows)
    dense = [int(np.argmax(z[t] + gumbel_f32(np, words_of(4096, seed=5, t=t)))) for t in range(64)]
    assert draw(np, logits, rows).token_ids.tolist() == dense


def test_greedy_takes_the_smallest_id_of_a_tie() -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, [5, 9]] = 3.0
    assert draw(np, logits, build(SamplingParams())).token_ids[0] == 5


def test_penalties_follow_the_history_and_the_path() -> None:
    logits = np.array([[2.0, -2.0, 1.0, 1.0] + [0.0] * (VOCAB - 4)], np.float32)
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    rows = build(params, prompt=[0], output=[1, 2, 2], path=[2, 3])
    edited = process(np, logits, rows)[0]
    assert edited[:5].tolist() == [1.0, -4.0 - 0.75, 0.5 - 0.5 - 0.75, 0.5 - 0.75, 0.0]
    assert logits[0, 0] == 2.0  # raw logits stay: log-probabilities need them


def test_presence_and_frequency_ignore_the_prompt() -> None:
    params = SamplingParams(presence_penalty=1.0, frequency_penalty=1.0)
    edited = process(np, np.zeros((1, VOCAB), np.float32), build(params, prompt=[0, 1], output=[1]))
    assert edited[0, :3].tolist() == [0.0, -2.0, 0.0]


def test_bias_and_bans_before_min_tokens() -> None:
    """The ban is on exactly while output and path are shorter than min_tokens."""
    params = SamplingParams(min_tokens=3, logit_bias=((4, 1.5),))
    logits = np.zeros((1, VOCAB), np.float32)
    early = process(np, logits, build(params, output=[1], path=[2], stopping=[7]))[0]
    late = process(np, logits, build(params, output=[1], path=[2, 2], stopping=[7]))[0]
    assert early[[4, 7]].tolist() == [1.5, -math.inf]
    assert late[[4, 7]].tolist() == [1.5, 0.0]


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.8, top_p=0.9), SamplingParams()])
def test_a_mask_bans_all_that_it_does_not_allow(params: SamplingParams) -> None:
    """As a bias of -inf would; a row that holds NaN stays unusable, and row 0 of the table is never looked at."""
    logits = np.random.default_rng(4).standard_normal((4, VOCAB)).astype(np.float32)
    logits[3, 5] = np.nan
    rows, allowed = build(params, num_rows=4), np.zeros((2, 1), np.uint32)
    allowed[1] = 0b1010110
    banned = [i for i in range(VOCAB) if not 0b1010110 >> i & 1]
    ids = np.tile(banned, 3)
    biased = replace(rows, bias_rows=np.repeat([0, 1, 3], len(banned)), bias_ids=ids, bias=np.full(len(ids), -np.inf))
    masked = replace(rows, masks=np.array([1, 1, 0, 1]), allowed=allowed)
    for found, expected in zip(draw(np, logits, masked), draw(np, logits, biased), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert draw(np, logits, masked).token_ids[3] == NO_TOKEN
    np.testing.assert_array_equal(probabilities(np, logits, masked), probabilities(np, logits, biased))


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_broken_logits_draw_no_token(broken: float) -> None:
    logits = np.random.default_rng(2).standard_normal((3, VOCAB)).astype(np.float32)
    for params in (SamplingParams(), SamplingParams(temperature=1.0, top_p=0.9, top_k=5, min_p=0.1)):
        expected = draw(np, logits, build(params, num_rows=3))
        changed = logits.copy()
        changed[1, 4] = broken
        with np.errstate(all="ignore"):
            found = draw(np, changed, build(params, num_rows=3))
        assert found.token_ids[1] == NO_TOKEN
        assert found.token_ids[[0, 2]].tolist() == expected.token_ids[[0, 2]].tolist()
        assert found.logprobs[[0, 2]].tobytes() == expected.logprobs[[0, 2]].tobytes()


def test_a_row_does_not_depend_on_its_batch() -> None:
    logits = np.random.default_rng(3).standard_normal((9, VOCAB)).astype(np.float32)
    params = SamplingParams(temperature=0.9, top_p=0.95)
    whole = draw(np, logits, build(params, num_rows=9, t=0))
    for row in range(9):
        alone = draw(np, logits[row : row + 1], build(params, t=row))
        assert alone.token_ids[0] == whole.token_ids[row]
        assert alone.logprobs[0].tobytes() == whole.logprobs[row].tobytes()


def test_logprobs_are_of_raw_logits() -> None:
    logits = np.random.default_rng(4).standard_normal((4, VOCAB)).astype(np.float32)
    ids = np.array([1, 5, 9, 23])
    exact = logits.astype(np.float64)
    exact = exact - np.log(np.exp(exact).sum(axis=-1, keepdims=True))
    assert np.allclose(logprobs_of(np, logits, ids), exact[np.arange(4), ids], atol=1e-6)
    hot = draw(np, logits, build(SamplingParams(temperature=5.0, top_k=3), num_rows=4))
    assert np.allclose(hot.logprobs, exact[np.arange(4), hot.token_ids], atol=1e-6)
    top_ids, values = top_logprobs(np, logits, 3)
    assert top_ids[0].tolist() == np.argsort(-logits[0])[:3].tolist()
    assert np.allclose(values[0], exact[0, top_ids[0]], atol=1e-6)


def test_noisy_top_k_starts_with_the_draw() -> None:
    logits = np.random.default_rng(5).standard_normal((6, VOCAB)).astype(np.float32)
    for params in (SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=2)):
        rows = build(params, num_rows=6)
        ids, values, _ = noisy_top_k(np, logits, rows, 4)
        assert ids[:, 0].tolist() == draw(np, logits, rows).token_ids.tolist()
        assert (np.diff(values[np.isfinite(values).all(axis=-1)], axis=-1) <= 0).all()


def test_probabilities_are_what_is_sampled() -> None:
    """Frequencies of 20,000 draws match the processed distribution; another temperature's does not."""
    logits = np.random.default_rng(6).standard_normal((1, VOCAB)).astype(np.float32)
    params = SamplingParams(temperature=0.8, top_k=6)
    p = probabilities(np, logits, build(params))[0]
    num_draws = 20_000
    rows = build(params, num_rows=num_draws, t=0)
    counts = np.bincount(draw(np, np.repeat(logits, num_draws, axis=0), rows).token_ids, minlength=VOCAB)
    kept = p > 0

    def statistic(q: np.ndarray) -> float:
        return float(((counts[kept] - q[kept] * num_draws) ** 2 / (q[kept] * num_draws)).sum())

    wrong = probabilities(np, logits, build(SamplingParams(temperature=1.2, top_k=6)))[0]
    assert counts[~kept].sum() == 0
    assert statistic(p) < 25.7  # chi-square, 5 degrees of freedom, p = 1e-4
    assert statistic(wrong) > 40.0
