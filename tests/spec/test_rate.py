"""Running acceptance: a belief that observations move, old ones fading."""

from __future__ import annotations

import pytest

from verispec.spec.rate import Rate


def test_without_observations_the_belief_stands() -> None:
    assert Rate(0.7, 10.0, 0.9).value == pytest.approx(0.7)


def test_the_belief_counts_as_so_many_tries() -> None:
    rate = Rate(0.5, 4.0, 1.0)
    for is_accepted in (True, True, False, True):
        rate.observe(is_accepted)
    assert rate.value == pytest.approx((0.5 * 4 + 3) / (4 + 4))


def test_old_tries_fade_with_each_new_one() -> None:
    rate = Rate(0.5, 2.0, 0.5)
    rate.observe(True)
    rate.observe(False)
    assert (rate.accepted, rate.tried) == (0.5, 1.5)
    assert rate.value == pytest.approx((1.0 + 0.5) / (2.0 + 1.5))


@pytest.mark.parametrize("truth", [0.0, 0.25, 0.5, 1.0])
def test_it_finds_the_truth_and_stays_a_probability(truth: float) -> None:
    rate = Rate(0.9, 8.0, 0.98)
    for i in range(400):
        rate.observe(int(i * truth) != int((i + 1) * truth))
        assert 0 <= rate.value <= 1
    assert rate.value == pytest.approx((0.9 * 8 + 50 * truth) / 58, abs=0.03)  # 50 tries are remembered


def test_whoever_remembers_a_rate_can_see_that_it_changed() -> None:
    """Noticeably: by more than would change what pays."""
    rate = Rate(0.5, 32.0, 0.98)
    rate.observe(True)
    assert rate.version == 0, "one try is a small change"
    published, version = rate.value, rate.version
    for _ in range(50):
        rate.observe(2, 2)
        if rate.version != version:
            published, version = rate.value, rate.version
        assert abs(rate.value - published) <= 0.02
    assert 3 < version < 50
