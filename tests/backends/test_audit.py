"""The audit finds what is impure, chooses by its fixed rule, and is cached under the fingerprint."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from tests.support.fake_backend import FakeBackend
from tests.support.tiny_llm import loaded, write_model
from verispec.backends import calibration
from verispec.backends.audit import Audit, KernelProbe, audit
from verispec.backends.calibration import calibrate
from verispec.backends.cost import CostTable, measure_cost
from verispec.engine import Engine, Request
from verispec.errors import DeterminismError, InputError
from verispec.spec.registry import make_drafters
from verispec.types import FinishReason, SamplingParams

SHAPES = (1, 2, 4, 8, 16)


def probe(run: object) -> KernelProbe:
    return KernelProbe("probed", 8, run)  # type: ignore[arg-type]


def families(run: object) -> tuple[tuple[int, ...], ...]:
    return audit([probe(run)], shapes=SHAPES).families


def test_a_pure_kernel_is_one_family() -> None:
    assert families(lambda x: x * 2) == (SHAPES,)


def test_dependence_on_the_shape_splits_families() -> None:
    assert families(lambda x: x * (2 if len(x) < 4 else 3)) == ((1, 2), (4, 8, 16))


@pytest.mark.parametrize(
    "leak",
    [
        lambda x: x + np.arange(len(x), dtype=np.float32)[:, None],  # the index
        lambda x: x + x.sum(axis=0) * 1e-3,  # every neighbour
        lambda x: x + (0 * x).sum(axis=0),  # NaN and Inf neighbours only
        lambda x: np.where(np.arange(len(x))[:, None] == len(x) - 1, x * 2, x),  # the last row
        lambda x: np.where(np.abs(np.roll(x, 1, axis=0)) > 1e20, x * 2, x),  # a huge neighbour
        lambda x: np.where((np.arange(len(x))[:, None] == 5) & (len(x) == 16), x * 2, x),  # one index of one shape
    ],
)
def test_every_leak_is_found(leak: object) -> None:
    found = families(leak)
    assert all(16 not in f for f in found)
    assert families(lambda x: x) == (SHAPES,)


def test_families_hold_for_all_kernels_together() -> None:
    splitting = [probe(lambda x: x * (len(x) < 4)), probe(lambda x: x * (len(x) < 16))]
    assert audit(splitting, shapes=SHAPES).families == ((1, 2), (4, 8), (16,))


def test_the_family_with_the_largest_shape_is_chosen() -> None:
    found = Audit((), ((1, 64), (2, 4, 128), (8,)))
    assert found.choose() == (2, 4, 128)
    assert found.choose(named=[8]) == (8,)
    assert found.choose(named=[4, 2]) == (2, 4)
    with pytest.raises(InputError, match="not one pure family"):
        found.choose(named=[1, 2])


class ImpureBackend(FakeBackend):
    """No shape of its one kernel is pure."""

    def probes(self) -> list[KernelProbe]:
        return [probe(lambda x: x + np.random.default_rng().random())]


def test_without_a_family_nothing_is_chosen_and_an_operator_cannot_name_one() -> None:
    hopeless = audit(ImpureBackend().probes(), shapes=SHAPES)
    assert hopeless.choose() == ()
    with pytest.raises(InputError, match=r"(?s)\[4\] are not one pure family.*probed.*impure: 1,2,4,8,16"):
        hopeless.choose(named=[4])


def test_without_a_family_the_engine_refuses_and_shows_the_audits_table() -> None:
    """As `LLM.fresh_engine` makes its engines; requests that give the promise up are served."""
    backend = ImpureBackend(context_len=64)
    found = calibrate(backend)
    assert found.family == ()
    engine = Engine(
        backend, family=found.family, cost=found.cost, drafters=make_drafters(), no_family_reason=found.audit.table()
    )
    with pytest.raises(DeterminismError, match=r"(?s)cannot be served here.*probed  pure: none  impure: 1,2,3,4,6,8"):
        engine.add(Request([1, 2, 3]))
    engine.add(Request([1, 2, 3], SamplingParams(max_tokens=5, deterministic=False)))
    events = [event for _ in range(5) for event in engine.step()]
    assert events[-1].finish_reason is FinishReason.LENGTH


def test_without_a_family_an_llm_refuses_and_shows_the_audits_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "audit", lambda probes, **options: audit(ImpureBackend().probes(), **options))
    with loaded(write_model(tmp_path / "tiny.gguf"), tmp_path, backend="numpy") as llm:
        with pytest.raises(DeterminismError, match=r"(?s)row-pure for every kernel.*probed  pure: none  impure: 1,2"):
            llm.generate("one two", SamplingParams(max_tokens=3))
        free = SamplingParams(max_tokens=3, deterministic=False, ignore_eos=True)
        assert len(llm.generate("one two", free)[0].token_ids) == 3


def test_calibration_is_cached_under_the_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FakeBackend(context_len=64)
    first = calibrate(backend, cache_dir=tmp_path)
    (path,) = tmp_path.glob("audit-*.json")
    monkeypatch.setattr(calibration, "audit", lambda *args, **kwargs: pytest.fail("measured again"))
    again = calibrate(backend, cache_dir=tmp_path)
    assert again == first
    assert again.profile.hash == first.profile.hash
    monkeypatch.setattr(backend, "fingerprint", lambda store: {"arithmetic": "another"})
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        calibrate(backend, cache_dir=tmp_path)
    assert json.loads(path.read_text())["outcomes"]


def test_an_edited_cache_is_not_trusted(tmp_path: Path) -> None:
    """Other shapes, classes, costs, format or fingerprint than were measured: measured again."""
    backend = FakeBackend(context_len=64)
    expected = calibrate(backend, cache_dir=tmp_path)
    (path,) = tmp_path.glob("audit-*.json")
    good = json.loads(path.read_text())
    edits: list[dict[str, object]] = [
        {"format": 1},
        {"fingerprint": {"arithmetic": "another"}},
        {"outcomes": [{"name": "double", "classes": [[1, 2, 5]], "impure": []}]},
        {"cost": {**good["cost"], "base": []}},
        {"cost": {**good["cost"], "base": [-1.0] * len(good["cost"]["base"])}},
    ]
    for edit in edits:
        path.write_text(json.dumps({**good, **edit}))
        assert calibrate(backend, cache_dir=tmp_path).family == expected.family
        assert json.loads(path.read_text())["outcomes"] == good["outcomes"]


@pytest.mark.parametrize("rubbish", ["", "{}", "[1]", '{"outcomes": 3}', "\x00"])
def test_a_broken_cache_is_measured_again(tmp_path: Path, rubbish: str) -> None:
    backend = FakeBackend(context_len=64)
    expected = calibrate(backend, cache_dir=tmp_path)
    (path,) = tmp_path.glob("audit-*.json")
    path.write_text(rubbish)
    assert calibrate(backend, cache_dir=tmp_path).family == expected.family
    assert json.loads(path.read_text())["outcomes"]


def test_an_unwritable_cache_is_no_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert calibrate(FakeBackend(context_len=64), cache_dir=blocked / "below").family


def test_profiles_differ_by_fingerprint_family_and_version_of_the_weights() -> None:
    backend = FakeBackend(context_len=64)
    profiles = [calibrate(backend).profile, calibrate(backend, family=(4, 8)).profile]
    backend.weights_version = 1
    profiles.append(calibrate(backend).profile)
    assert profiles[0].fingerprint == profiles[2].fingerprint
    assert len({profile.hash for profile in profiles}) == 3


def test_measured_cost_is_base_plus_context() -> None:
    """With a clock that charges rows and context, the table gives that charge back."""
    backend = FakeBackend(context_len=128)
    now = 0.0

    def clock() -> float:
        nonlocal now
        if backend.passes:
            rows = backend.passes.pop().rows
            now += 1.0 * len(rows) + 0.01 * int((rows.positions + 1).sum())
        return now

    cost = measure_cost(backend, (1, 4, 16), clock=clock, budget_seconds=math.inf)
    for shape, context in ((1, 10), (4, 100), (16, 700)):
        assert cost.seconds(shape, context) == pytest.approx(shape + 0.01 * context)
    assert cost.seconds(8, 0) == pytest.approx(8)
    assert cost.seconds(32, 0) == pytest.approx(32)


@pytest.mark.parametrize("factor", [3.0, 0.3])
def test_a_moment_of_another_speed_changes_no_cost(factor: float) -> None:
    """A machine that is slower, or faster, for as long as one round takes is seen as it is otherwise."""
    backend = FakeBackend(context_len=128)
    now, num_passes, num_odd = 0.0, 0, 6  # a round over three shapes at two contexts

    def clock() -> float:
        nonlocal now, num_passes
        if backend.passes:
            num_passes += 1
            now += len(backend.passes.pop().rows) * (factor if 5 <= num_passes < 5 + num_odd else 1.0)
        return now

    shapes = (1, 4, 64)
    assert measure_cost(backend, shapes, clock=clock, budget_seconds=math.inf).base == pytest.approx(shapes)
    now, num_passes, num_odd = 0.0, 0, 1000
    assert measure_cost(backend, shapes, clock=clock, budget_seconds=math.inf).base != pytest.approx(shapes)  # control


def test_the_cheapest_shape_is_chosen_even_if_larger() -> None:
    cost = CostTable((4, 8, 16), (5.0, 3.0, 4.0), (0.0, 0.0, 0.0))
    assert cost.cheapest((4, 8, 16)) == 8
    assert cost.cheapest((16, 4)) == 16
