"""The program of the equality oracle, on a CPU that stands in for the GPU: every way of it, with a tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tests.backends.cuda import oracle_check as oracle  # noqa: E402
from tests.support import tiny_llm  # noqa: E402
from tests.support.cuda_stand_in import StandIn  # noqa: E402
from tests.support.skipping import CHEAP  # noqa: E402
from verispec.llm import LLM  # noqa: E402
from verispec.spec.speculation import Speculation  # noqa: E402

pytestmark = pytest.mark.cuda
TEXTS = ("the other the other", "abc abc ab", "where are we")
SIZES = {"kv_slots": 1000, "max_running": 16}
NONE = Speculation.of("none")


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    """Seven layers, of which one is skipped, and sizes that suit the kernels; passes cost nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("verispec.backends.cuda.available.why_not", lambda *device: None)
    monkeypatch.setattr("verispec.backends.cuda.load.Gpu", lambda *device: StandIn())
    monkeypatch.setattr("verispec.backends.cuda.backend.CudaBackend.wrong_answers", lambda backend: ())
    monkeypatch.setattr("verispec.backends.calibration.measure_cost", lambda *_, **__: CHEAP)
    tokens = [*tiny_llm.TOKENS, *(f"more{i}" for i in range(-len(tiny_llm.TOKENS) % 16))]
    sizes = {"num_layers": 7, "hidden_size": 64, "head_dim": 16, "mlp_size": 64, "vocab_size": len(tokens)}
    types = [3, *[1] * (len(tokens) - 1)]
    model = tmp_path / "model.gguf"
    tiny_llm.write_model(model, replace(tiny_llm.CONFIG, **sizes), tokens=tokens, token_type=types)
    return partial(LLM, model, backend="cuda", drafter="none", **SIZES)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"turns": [text]}) for text in TEXTS))
    return path


def test_every_way_of_the_program_runs_and_gives_the_same(tiny: Callable[..., LLM], prompts: Path) -> None:
    """Eight bits of a tiny model draft as its sixteen do, so that the one thing which that way needs is missing."""
    failed = oracle.check(str(tiny.args[0]), prompts, num_tokens=24, count=3, short_of_slots=70, every=2, **SIZES)
    assert set(failed) <= {"forced drafts of model, 2 at once"}


def test_what_differs_and_what_did_not_happen_are_noticed(tiny: Callable[..., LLM], prompts: Path) -> None:
    """The control."""
    with tiny() as llm:
        requests = oracle.requests_of(llm, prompts, num_tokens=4, count=2)
        reference = oracle.outputs(llm.fresh_engine(**oracle.ALONE), requests, NONE)
        ways = {name: oracle.Way({}, needs=needs) for name, needs in (("plain", ()), ("short", ("preempted",)))}
        assert oracle.compare(llm, ways, requests, reference) == ["short"]
        changed = reference | {3: reference[2]}
        assert oracle.compare(llm, ways, requests, changed) == ["plain", "short"]
        assert oracle.other_seeds(llm, requests, reference) == []
        same = oracle.outputs(llm.fresh_engine(), {i: oracle._other_seed(r) for i, r in requests.items()}, NONE)
        assert oracle.other_seeds(llm, requests, same) == ["control"]
