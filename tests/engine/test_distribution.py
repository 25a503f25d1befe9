"""Invariant 7: what the engine samples is distributed as the target's own distribution, drafts or not.

Joint chi-square over three tokens through the production path (scheduler, noise, draw, judge, commit). The expected
probabilities come from scoring every continuation. The control reuses seeds now and then and must be rejected.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from tests.support.fake_backend import FakeBackend
from tests.support.scale import scaled
from tests.support.skipping import fake_setup
from verispec.engine import Engine, Request
from verispec.spec.registry import DRAFTERS, make_drafters
from verispec.spec.speculation import GRAMMAR, Speculation
from verispec.types import SampleOutput, SamplingParams

VOCAB = 4
PROMPT = [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
NUM_TOKENS = 3
NUM_REQUESTS = 6000
NUM_COMPARED = min(NUM_REQUESTS, scaled(NUM_REQUESTS))


def run(requests: list[Request]) -> list[SampleOutput]:
    backend = FakeBackend(vocab_size=VOCAB, model_seed=5, num_stores=2, looks_up=True)
    engine = Engine(backend, family=(4, 8, 16, 32, 64), drafters=make_drafters(fake_setup(backend)))
    found: dict[int, SampleOutput] = {}
    ids = []
    waiting = list(reversed(requests))
    while waiting or engine.has_work:
        while waiting and engine.num_waiting < 100:
            ids.append(engine.add(waiting.pop()))
        found |= {e.request_id: e.output for e in engine.step() if e.output is not None}
    return [found[i] for i in ids]


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    """The probability of every continuation, by teacher forcing; temperature 1 samples from the raw softmax."""
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    continuations = itertools.product(range(VOCAB), repeat=NUM_TOKENS)
    scored = run([Request([*PROMPT, *tokens], params) for tokens in continuations])
    logprobs = [sum(e.logprob for e in (o.prompt_logprobs or ())[-NUM_TOKENS:]) for o in scored]
    return np.exp(logprobs)


def p_value(outputs: list[SampleOutput], p: np.ndarray) -> float:
    """Chi-square by Wilson and Hilferty's approximation; cells that expect fewer than 5 are joined."""
    cells = [sum(t * VOCAB ** (NUM_TOKENS - 1 - i) for i, t in enumerate(o.token_ids)) for o in outputs]
    counts = np.bincount(cells, minlength=len(p)).astype(float)
    rare = p * len(outputs) < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(p[~rare], p[rare].sum()) * len(outputs)
    kept = wanted > 0
    statistic, k = float(((observed - wanted)[kept] ** 2 / wanted[kept]).sum()), int(kept.sum()) - 1
    z = ((statistic / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k))
    return 0.5 * math.erfc(z / math.sqrt(2))


def sample(drafter: str, seeds: list[int]) -> list[SampleOutput]:
    params = [SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=seed) for seed in seeds]
    return run([Request(PROMPT, p, speculation=Speculation(drafter)) for p in params])


@pytest.mark.parametrize("drafter", [name for name in DRAFTERS if name != GRAMMAR])  # nothing is forced here
def test_the_sampled_distribution_is_the_targets(drafter: str, expected: np.ndarray) -> None:
    assert expected.sum() == pytest.approx(1.0, abs=1e-4)
    outputs = sample(drafter, list(range(NUM_COMPARED)))
    assert p_value(outputs, expected) > 1e-6
    assert (sum(o.stats.accepted for o in outputs) > 0) == (drafter != "none")


@pytest.mark.slow
def test_control_a_reused_seed_is_noticed(expected: np.ndarray) -> None:
    seeds = [0 if i % 10 == 0 else i for i in range(NUM_REQUESTS)]
    assert p_value(sample("suffix", seeds), expected) < 1e-6
