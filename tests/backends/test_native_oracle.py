"""The promise on the native backend, with the real model: any crowd, any drafter, any shape gives the bits of `alone`.

Its rows are pure at every shape, so fast passes agree with canonical ones and a replay never finds another token. The
control is a library with the order of blocks reversed for rows that are computed together.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.native import smollm2_backend
from tests.support.skipping import skip_setup
from verispec.backends import native_library
from verispec.backends.native_backend import NativeBackend
from verispec.config import EngineConfig
from verispec.engine import Engine, Request
from verispec.spec.registry import DRAFTER_NAMES, make_drafters
from verispec.spec.speculation import Speculation
from verispec.types import SampleOutput, SamplingParams

PROMPTS = ([504, 3575, 282, 4649, 314], [28, 216, 33, 28, 216, 34, 28] * 4, [1195, 5231, 253, 655], [260, 905, 42] * 12)


def requests(drafter: str | None = None) -> list[Request]:
    options = ({}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9, "n": 2}, {"repetition_penalty": 1.3})
    speculation = None if drafter is None else Speculation(drafter)
    return [
        Request(prompt, SamplingParams(max_tokens=12, seed=i, ignore_eos=True, **extra), speculation=speculation)  # type: ignore[arg-type]
        for i, (prompt, extra) in enumerate(zip(PROMPTS, options, strict=True))
    ]


def run(backend: NativeBackend, wanted: list[Request], **config: int) -> tuple[list[list[str]], Engine]:
    options = {"num_slots": 512, "max_draft": 5, **config}
    engine = Engine(
        backend,
        family=backend.shapes,
        drafters=make_drafters(skip_setup(backend, draft_len=5)),
        config=EngineConfig(**options),  # type: ignore[arg-type]
    )
    ids = [engine.add(request) for request in wanted]
    found: dict[int, list[SampleOutput]] = {i: [] for i in ids}
    while engine.has_work:
        for event in engine.step():
            if event.output is not None:
                found[event.request_id].append(event.output)
        engine.check()
    return [[o.digest for o in sorted(found[i], key=lambda o: o.sample_index)] for i in ids], engine


@pytest.fixture(scope="module")
def backend(smollm2_path: Path) -> NativeBackend:
    return smollm2_backend(smollm2_path)


@pytest.fixture(scope="module")
def alone(backend: NativeBackend) -> list[list[str]]:
    return [run(backend, [request])[0][0] for request in requests("none")]


@pytest.mark.parametrize("drafter", DRAFTER_NAMES)
@pytest.mark.parametrize("config", [{}, {"row_budget": 3, "max_running": 3}, {"num_slots": 90, "max_len": 90}])
def test_a_crowd_changes_nothing(
    backend: NativeBackend, alone: list[list[str]], drafter: str, config: dict[str, int]
) -> None:
    free = [replace(r, params=replace(r.params, deterministic=False, seed=9)) for r in requests()]
    found, engine = run(backend, [*free[:2], *requests(drafter), *free[2:]], **config)
    assert found[2:6] == alone
    assert engine.totals.mismatches == 0
    if drafter == "decode":
        assert engine.totals.replays >= 5


def test_replays_never_mismatch_and_fast_passes_give_the_canonical_bits(
    backend: NativeBackend, alone: list[list[str]]
) -> None:
    free = [replace(r, params=replace(r.params, deterministic=False)) for r in requests("none")]
    assert run(backend, free)[0] == alone


def test_control_a_sabotaged_kernel_is_noticed(
    smollm2_path: Path,
    sabotaged: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native_library, "PATH", sabotaged)
    backend = smollm2_backend(smollm2_path)
    by_themselves = [run(backend, [request])[0][0] for request in requests("none")[:2]]
    crowd, _ = run(backend, requests("none")[:2])
    assert crowd != by_themselves
    backend.close()
