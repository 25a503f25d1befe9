"""The seconds of sub-layers, from a clock that charges known amounts for them."""

from __future__ import annotations

import pytest

from tests.support.fake_backend import FakeBackend
from tests.support.tunable import NUM_LAYERS, ChargingBackend, calibrated, charge
from verispec.backends.protocol import FULL_VIEW, View
from verispec.spec.skip_menu import SkipProfile
from verispec.tuning.profile import measure_profile

SOME = View.without((1, 2, 4), (3,))


def measured(backend: ChargingBackend | None = None, *, speed: float = 1.0) -> SkipProfile:
    backend = backend or ChargingBackend(FakeBackend(context_len=80))
    return measure_profile(backend, NUM_LAYERS, calibrated(speed=speed), clock=backend.clock)


def seconds(profile: SkipProfile) -> list[float]:
    tables = (profile.full, profile.attention, profile.mlp)
    return [table.seconds(rows, rows * 256) for table in tables for rows in (1, 4, 16, 32)]


@pytest.mark.parametrize("view", [FULL_VIEW, SOME])
def test_a_profile_gives_the_charges_back(view: View) -> None:
    profile = measured()
    for rows in (1, 4, 16):
        for context_tokens in (rows * 10, rows * 256):
            expected = charge(rows, context_tokens, NUM_LAYERS, view=view)
            assert profile.cost_of(view).seconds(rows, context_tokens) == pytest.approx(expected)


def test_parts_are_those_of_one_sub_layer() -> None:
    profile = measured()
    assert profile.attention.seconds(4, 100) == pytest.approx(0.1 * 1.8 + 0.1)
    assert profile.mlp.seconds(4, 100) == pytest.approx(0.2 * 1.4)
    assert profile.mlp.per_context_token == (0.0,) * 4
    assert profile.head is not None
    assert profile.head.seconds(4, 100) == pytest.approx(1.0)


def test_large_shapes_are_the_calibrations_at_the_speed_of_now() -> None:
    """A calibration made on a busy machine must not make verification look expensive."""
    fair, slow = measured(speed=1.0), measured(speed=3.0)
    assert slow.full.seconds(32, 32 * 256) == pytest.approx(fair.full.seconds(32, 32 * 256))
    assert slow.mlp.seconds(32, 0) / slow.full.seconds(32, 0) == pytest.approx(
        slow.mlp.seconds(16, 0) / slow.full.seconds(16, 0)
    )
    assert max(p.rows.positions.size for p in _passes()) == 16


def _passes() -> list:
    backend = ChargingBackend(FakeBackend(context_len=80))
    measured(backend)
    return backend.passes


class Disturbed(ChargingBackend):
    """A machine that is slow, or fast, while some passes run."""

    def __init__(self, odd: range, delay: float = 5.0) -> None:
        super().__init__(FakeBackend(context_len=80))
        self.odd, self.delay = odd, delay

    def clock(self) -> float:
        self.now += self.delay * (len(self.passes) in self.odd)
        return self.now


@pytest.mark.parametrize(("share", "delay"), [(0.25, 5.0), (0.5, 5.0), (0.15, -0.1)])
def test_a_disturbance_changes_nothing(share: float, delay: float) -> None:
    """Half of the time, if it is slow then; a seventh, if it is fast."""
    count = len(_passes())
    disturbed = measured(Disturbed(range(count // 4, count // 4 + int(share * count)), delay))
    assert seconds(disturbed) == pytest.approx(seconds(measured()))


def test_the_check_of_disturbances_can_fail() -> None:
    assert seconds(measured(Disturbed(range(10**9)))) != pytest.approx(seconds(measured()))


def test_noise_cannot_make_a_part_negative() -> None:
    class Backwards(ChargingBackend):
        """Skipping makes passes slower."""

        def clock(self) -> float:
            view = self.passes[-1].view if self.passes else FULL_VIEW
            self.now += 3.0 * (len(view.skipped_attention) + len(view.skipped_mlp))
            return self.now

    profile = measured(Backwards(FakeBackend(context_len=80)))
    for table in (profile.attention, profile.mlp):
        assert all(0 <= s < 1 for s in (*table.base, *table.per_context_token))
