"""The adaptive draft exit is the published recurrence, number by number."""

from __future__ import annotations

import pytest

from tests.support.adversaries import collect
from tests.support.fake_backend import FakeBackend
from tests.support.skipping import CHEAP, cheap_setup
from verispec.config import EngineConfig
from verispec.engine import Engine, Request
from verispec.spec.model_drafter import DraftExit
from verispec.spec.registry import make_drafters
from verispec.spec.speculation import Speculation
from verispec.spec.tree import TreeShape
from verispec.types import SamplingParams

MOST = 12
# (matched, drafted) of each round, then AR and gamma as the published rule gives them, worked out by hand:
# AR = AR / 2 + matched / drafted / 2; gamma moves by +0.001 below 0.9, by nothing at 0.9 and a full draft, else -0.001.
ROUNDS = [
    ((5, 5), 0.5, 0.601),
    ((0, 4), 0.25, 0.602),
    ((12, 12), 0.625, 0.603),
    ((12, 12), 0.8125, 0.604),
    ((12, 12), 0.90625, 0.604),
    ((3, 3), 0.953125, 0.603),
    ((7, 7), 0.9765625, 0.602),
    ((12, 12), 0.98828125, 0.602),
    ((1, 2), 0.744140625, 0.603),
]


def test_the_published_recurrence_number_by_number() -> None:
    state = DraftExit()
    assert (state.gamma, state.rate) == (0.6, 0.0)
    for (matched, drafted), rate, gamma in ROUNDS:
        state.observe(matched=matched, drafted=drafted, most=MOST)
        assert state.rate == pytest.approx(rate, abs=1e-12)
        assert state.gamma == pytest.approx(gamma, abs=1e-12)


def test_a_round_without_a_draft_changes_nothing() -> None:
    state = DraftExit()
    state.observe(matched=0, drafted=0, most=MOST)
    assert (state.gamma, state.rate) == (0.6, 0.0)


def test_it_moves_at_most_a_thousandth_a_round() -> None:
    state = DraftExit()
    for i in range(50):
        before = state.gamma
        state.observe(matched=i % 4, drafted=3 if i % 4 < 4 and i % 4 <= 3 else 4, most=3)
        assert abs(state.gamma - before) <= 0.001 + 1e-12


@pytest.mark.parametrize(
    ("probability", "stops"), [(0.59, True), (0.6, False), (0.61, False), (1.0, False), (float("nan"), True)]
)
def test_the_exit_is_below_the_threshold(probability: float, stops: bool) -> None:
    assert DraftExit().stops(probability) is stops


def test_the_threshold_stays_where_probabilities_are() -> None:
    """Beyond 1 every chain has one token whatever the threshold is, but the way back would take as many rounds."""
    bad, good = DraftExit(gamma=0.9995), DraftExit(gamma=0.0005, rate=1.0)
    for _ in range(5):
        bad.observe(matched=0, drafted=1, most=MOST)
        good.observe(matched=2, drafted=2, most=MOST)
    assert (bad.gamma, good.gamma) == (1.0, 0.0)


@pytest.mark.parametrize("max_burst", [1, 8])
@pytest.mark.parametrize("drafter", ["skip", "model"])
def test_chains_end_early_unless_a_shape_is_asked_for(drafter: str, max_burst: int) -> None:
    """By the host and by the backend; whatever is drafted, the output is the same."""

    def ended(speculation: Speculation, *, exits: bool) -> tuple[str, float]:
        backend = FakeBackend(vocab_size=16, num_stores=2)
        backend.markov[1] = 0.7 * backend.markov[0] + 0.3 * backend.markov[1]
        engine = Engine(
            backend, family=(1, 2, 4, 8, 16), drafters=make_drafters(cheap_setup(backend, 5, exits=exits)), cost=CHEAP,
            config=EngineConfig(num_slots=256, max_len=120, max_burst=max_burst),
        )  # fmt: skip
        params = SamplingParams(max_tokens=90, temperature=1.0, seed=3, ignore_eos=True)
        engine.add(Request((1, 2, 3), params, speculation))
        (output,) = collect(engine).values()
        return output.digest, output.stats.drafted / output.stats.passes

    plain, _ = ended(Speculation("none"), exits=True)
    early, shorter = ended(Speculation(drafter), exits=True)
    full, longer = ended(Speculation(drafter), exits=False)
    asked, shaped = ended(Speculation(drafter, TreeShape.chain(5)), exits=True)
    assert plain == early == full == asked
    assert shorter < 0.8 * longer
    assert shaped == longer
