"""What passes cost: timed within a budget at first, then learned from the passes that are served."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.fake_backend import FakeBackend
from tests.support.tiny_llm import loaded, write_model
from verispec.backends import calibration
from verispec.backends.cost import BUDGET_SECONDS, SHORT_CONTEXT, CostTable, measure_cost, probe_pass
from verispec.types import SamplingParams

SHAPES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


def line(shape: int, context_tokens: int, speed: float = 1.0) -> float:
    return speed * (0.01 + 0.002 * shape + 1e-6 * context_tokens)


def table(speed: float = 1.0, *, learns: bool = True) -> CostTable:
    slopes = (1e-6 * speed,) * len(SHAPES)
    return CostTable(SHAPES, tuple(line(m, 0, speed) for m in SHAPES), slopes, learns=learns)


class SlowBackend(FakeBackend):
    """Charges a clock for its passes."""

    now = 0.0
    speed = 1.0

    def clock(self) -> float:
        while self.passes:
            rows = self.passes.pop().rows
            self.now += line(len(rows), int((rows.positions + 1).sum()), self.speed)
        return self.now


@pytest.mark.parametrize("speed", [0.01, 1.0, 10.0])
def test_timing_ends_in_time_and_knows_every_shape(speed: float) -> None:
    """A slow model's large shapes follow from its small ones; only the first points are timed whatever they take."""
    backend = SlowBackend(context_len=1024)
    backend.speed = speed
    cost = measure_cost(backend, SHAPES, clock=backend.clock)
    assert backend.now < BUDGET_SECONDS + 3 * line(2, 64, speed)
    assert cost.shapes == SHAPES
    for shape in (1, 2, 8, 32, 128):
        assert cost.seconds(shape, 0) == pytest.approx(line(shape, 0, speed), rel=0.1)


class HeldUpBackend(SlowBackend):
    """Other work takes the machine whenever one row reads a long context."""

    def clock(self) -> float:
        self.now += 0.05 * sum(len(p.rows) == 1 and int(p.rows.positions[0]) >= SHORT_CONTEXT for p in self.passes)
        return super().clock()


def test_passes_that_are_held_up_do_not_make_a_shape_seem_to_read_slowly() -> None:
    """Where all of a point's timings were, its line has the slope of the others. Short contexts are not concerned."""
    backend = HeldUpBackend(context_len=1024)
    cost = measure_cost(backend, SHAPES, clock=backend.clock)
    for context_tokens in (0, 100, 500):
        assert cost.seconds(1, context_tokens) == pytest.approx(line(1, context_tokens), rel=0.1)


def test_without_time_the_rest_is_extrapolated() -> None:
    backend = SlowBackend(context_len=1024)
    cost = measure_cost(backend, SHAPES, clock=backend.clock, budget_seconds=1e-6)
    assert cost.seconds(128, 0) == pytest.approx(line(128, 0), rel=0.3)
    assert cost.per_context_token == (0.0,) * len(SHAPES)


def test_a_table_follows_the_machine_through_noise_and_outliers() -> None:
    """Half as fast as it was timed, with passes that other work holds up: found within a tenth, for all shapes."""
    rng, cost = random.Random(0), table()
    for _ in range(1500):
        shape, context = rng.choice((1, 1, 1, 5, 8)), rng.randrange(2000)
        held_up = 1.0 + rng.random() * 0.05 + (rng.random() < 0.2) * rng.expovariate(0.5)
        cost.observe(shape, context, line(shape, context, 2.0) * held_up)
    for shape in (1, 2, 4, 8, 64):
        assert cost.seconds(shape, 1000) == pytest.approx(line(shape, 1000, 2.0), rel=0.1)


def test_a_shape_of_its_own_kind_is_learned_apart_from_the_others() -> None:
    rng, cost = random.Random(1), table()
    for _ in range(4000):
        shape = rng.choice((1, 8))
        cost.observe(shape, 100, line(shape, 100) * (3.0 if shape == 8 else 1.0) * (1 + 0.02 * rng.random()))
    assert cost.seconds(8, 100) == pytest.approx(3 * line(8, 100), rel=0.1)
    assert cost.seconds(1, 100) == pytest.approx(line(1, 100), rel=0.1)


@pytest.mark.parametrize("speed", [0.36, 2.0])
def test_a_table_never_moves_past_what_it_observes(speed: float) -> None:
    """A machine of another speed than it was timed at: after eight passes it is known, for all shapes."""
    cost, before = table(), 1 / speed
    for i in range(40):
        cost.observe(8, 0, line(8, 0, speed))
        left = cost.seconds(8, 0) / line(8, 0, speed)
        assert abs(math.log(left)) <= abs(math.log(before)) + 1e-9
        assert (left - 1) * (before - 1) > -0.04, "it overshot by more than looked-up values may be late"
        before = left
        if i >= 7:
            assert all(cost.seconds(m, 0) == pytest.approx(line(m, 0, speed), rel=0.12) for m in SHAPES)


def test_a_shape_that_is_rarely_observed_is_learned_from_a_few_passes() -> None:
    """Large passes take twice as long as was thought. What is well known hardly moves by them."""
    cost = table()
    for _ in range(100):
        cost.observe(8, 0, line(8, 0))
    for _ in range(5):
        cost.observe(96, 0, 2 * line(96, 0))
    assert cost.seconds(96, 0) > 1.6 * line(96, 0)
    assert cost.seconds(8, 0) == pytest.approx(line(8, 0), rel=0.06)


def test_doubt_of_what_is_never_observed_has_an_end() -> None:
    """However long only small passes ran, a large one that was held up moves its shape no further than at first."""
    moved = []
    for count in (100, 5000):
        cost = table()
        for _ in range(count):
            cost.observe(1, 0, line(1, 0))
        cost.observe(128, 0, 100 * line(128, 0))
        moved.append(cost.seconds(128, 0) / line(128, 0))
    assert 1.2 < moved[1] < 1.3 * moved[0] < 4


def test_the_version_grows_when_costs_have_moved_among_themselves() -> None:
    rng, cost = random.Random(2), table()
    for shape in (1, 8) * 100:
        cost.observe(shape, 0, line(shape, 0) * rng.uniform(0.95, 1.05))
    settled = cost.version
    for shape in (1, 8) * 100:
        cost.observe(shape, 0, line(shape, 0) * rng.uniform(0.95, 1.05))
    assert cost.version == settled
    for _ in range(20):
        cost.observe(8, 0, 2 * line(8, 0))
    assert cost.version > settled


def test_one_pass_moves_little_however_long_it_took() -> None:
    cost = table()
    for _ in range(400):
        cost.observe(1, 0, line(1, 0))
    before = cost.seconds(1, 0)
    for seconds in (1e9, float("inf"), float("nan"), 0.0, -1.0):
        cost.observe(1, 0, seconds)
    for _ in range(16):
        cost.observe(1, 0, before)
    assert cost.seconds(1, 0) == pytest.approx(before, rel=0.2)


def test_a_table_that_was_given_stays() -> None:
    cost = table(learns=False)
    for _ in range(100):
        cost.observe(1, 0, 1.0)
    assert cost == table(learns=False)


def test_only_passes_of_the_kind_that_is_timed_are_learned_from() -> None:
    """All rows draw, no sub-layer is skipped: prompts without logits are cheaper, and say nothing of drafts."""
    backend, cost = FakeBackend(context_len=128), table()
    whole = probe_pass(backend, 4, 32)
    cost.observe_pass(probe_pass(backend, 4, 32, draws=False), 1.0)
    cost.observe_pass(replace(whole, view=type(whole.view)(frozenset({0}))), 1.0)
    assert cost.num_observed == 0
    cost.observe_pass(whole, 1.0)
    assert cost.num_observed == 1


@pytest.mark.slow
def test_what_was_learned_is_kept_for_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cache = write_model(tmp_path / "tiny.gguf"), tmp_path / "cache"
    params = SamplingParams(max_tokens=30, ignore_eos=True, seed=0)
    with loaded(path, cache) as llm:
        timed, digest = llm.calibration.cost.base, llm.generate("one two", params)[0].digest
    with loaded(path, cache) as llm:
        assert llm.calibration.cost.base == timed, "too few passes to teach anything"
        for _ in range(40):  # a burst of rounds is one observation
            assert llm.generate("one two", params)[0].digest == digest
        learned = llm.calibration.cost.base
    assert learned != timed
    monkeypatch.setattr(calibration, "measure_cost", lambda *args, **options: pytest.fail("timed again"))
    with loaded(path, cache) as llm:
        assert llm.calibration.cost.base == learned
        assert llm.generate("one two", params)[0].digest == digest


def test_passes_by_fast_weights_are_timed_apart(tmp_path: Path) -> None:
    """Their column is kept on disk with the weights' name, and timed again for others."""

    def fast_column(name: str) -> CostTable | None:
        backend = FakeBackend(context_len=1024)
        backend.limits = replace(backend.limits, fast_weights=name)
        found = calibration.calibrate(backend, cache_dir=tmp_path)
        asked.append(any(p.only_drafts for p in backend.passes))
        return found.cost.fast

    asked: list[bool] = []
    int4 = fast_column("int4")
    assert fast_column("int4") == int4 is not None
    assert fast_column("int8") is not None
    assert fast_column("") is None
    assert asked == [True, False, True, False]


def test_what_a_draft_costs_beside_the_target_survives_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target's table learns that the machine is half as fast as it was timed; nobody observes the draft model's.
    One that is timed afterwards, on the slow machine, is not taken for slower still."""
    speed, backend = 1.0, FakeBackend(num_stores=2)

    def timed(backend: object, shapes: tuple[int, ...], *, store: int = 0, **how: object) -> CostTable:
        costs = tuple(speed * (0.4 if store else 1.0) * line(m, 0) for m in shapes)
        return CostTable(shapes, costs, (0.0,) * len(shapes), learns=True)

    def started() -> tuple[calibration.Calibration, float]:
        """The share is by the costs that the policy takes for a draft pass and for one of the target."""
        found = calibration.calibrate(backend, cache_dir=tmp_path)
        assert found.draft_cost is not None
        return found, found.cost.speed * found.draft_cost.seconds(1, 0) / found.cost.seconds(1, 0)

    monkeypatch.setattr(calibration, "measure_cost", timed)
    found, share = started()
    assert share == pytest.approx(0.4)
    for _ in range(400):
        found.cost.observe(1, 0, line(1, 0, 2.0))
    found.save()
    found, share = started()
    assert found.cost.seconds(1, 0) == pytest.approx(line(1, 0, 2.0), rel=0.05)
    assert share == pytest.approx(0.4, rel=0.1)
    speed = 2.0
    for path in tmp_path.glob("draft-*"):
        path.unlink()
    assert started()[1] == pytest.approx(0.4, rel=0.1)
