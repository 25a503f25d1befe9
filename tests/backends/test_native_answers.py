"""The known-answer test at load: every build gives the kept answers, a changed one does not and serves no promise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.native import ISAS, on
from tests.support.tiny_llm import loaded, write_model
from verispec.backends import calibration, native_answers
from verispec.backends import native_library as native
from verispec.backends.native_model import LAYOUTS
from verispec.backends.options import NativeOptions
from verispec.errors import DeterminismError
from verispec.types import SamplingParams

KV_DTYPES = NativeOptions.SERVES["kv_dtype"]

pytestmark = pytest.mark.usefixtures("native_kernels")


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(("isa", "threads"), [(isa, 1 + i) for i, isa in enumerate(ISAS)])
def test_every_instruction_set_gives_the_kept_answers(isa: str, threads: int, kv_dtype: str) -> None:
    assert json.loads(native_answers.PATH.read_text())["arithmetic"] == NativeOptions.SERVES["arithmetic"][0]
    assert native_answers.wrong_answers(native_answers.cases(kv_dtype), on(isa, threads)) == ()


def test_every_case_has_an_answer_of_its_own() -> None:
    """Types, quantisation at load and the K/V's type all show."""
    kept = json.loads(native_answers.PATH.read_text())["answers"]
    cases = [case for kv_dtype in KV_DTYPES for case in native_answers.cases(kv_dtype)]
    assert {case.type_name for case in cases} == set(LAYOUTS)
    assert kept.keys() == {case.name for case in cases}
    assert len(set(kept.values())) == len(cases)


def test_control_reversed_blocks_give_wrong_answers(sabotaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every quantised type, and in no other: there the sabotage changes nothing."""
    monkeypatch.setattr(native, "PATH", sabotaged)
    quantised = [c.name for c in native_answers.cases("float16") if c.quantises or c.type_name.startswith("Q")]
    assert native_answers.wrong_answers(native_answers.cases("float16"), on("", 2)) == tuple(quantised)


def test_a_changed_library_serves_only_what_gives_the_promise_up(
    tmp_path: Path, sabotaged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "PATH", sabotaged)
    cache, path = tmp_path / "cache", write_model(tmp_path / "tiny.gguf")
    with loaded(path, cache, weights="q8") as llm:
        assert llm.calibration.family == ()
        with pytest.raises(DeterminismError, match=r"fail their known-answer test \(F\d+ as Q8_0, float16 K/V"):
            llm.generate("one two", SamplingParams(max_tokens=3))
        free = SamplingParams(max_tokens=3, deterministic=False, ignore_eos=True)
        assert len(llm.generate("one two", free)[0].token_ids) == 3
    assert not list(cache.rglob("*.json")), "nothing is kept of a library that is not trusted"
    with loaded(path, cache) as llm:  # float weights, whose kernels are as they should be
        assert llm.calibration.wrong_answers == ()


def test_the_cases_of_a_model_are_those_of_its_kernels() -> None:
    every = native_answers.cases("float16")
    plain = [c.name for c in every if c.concerns({"Q4_K", "Q6_K"}, quantises=False, is_gemma=False)]
    assert plain == [f"{name}, float16 K/V" for name in ("F32", "F16", "Q4_K", "Q6_K")]
    assert [c for c in every if c.concerns(set(LAYOUTS), quantises=True, is_gemma=True)] == every


def test_loading_audits_nothing_and_has_the_profile_of_a_full_audit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "tiny.gguf")
    with monkeypatch.context() as patch:
        patch.setattr(calibration, "audit", lambda *args, **options: pytest.fail("audited"))
        with loaded(path, tmp_path / "cache") as quick:
            assert quick.calibration.wrong_answers == ()
            with (
                pytest.raises(pytest.fail.Exception, match="audited"),
                loaded(path, tmp_path / "other", full_audit=True),
            ):
                pass
    with loaded(path, tmp_path / "cache", full_audit=True) as full:
        assert full.calibration.audit.outcomes
        assert full.calibration.profile == quick.calibration.profile
    monkeypatch.setattr(calibration, "audit", lambda *args, **options: pytest.fail("audited"))
    with loaded(path, tmp_path / "cache", full_audit=True) as kept:
        assert kept.calibration.audit == full.calibration.audit


def test_what_an_audit_found_outweighs_known_answers(tmp_path: Path) -> None:
    """Impurity that was measured is not forgotten at the next load."""
    path, cache = write_model(tmp_path / "tiny.gguf"), tmp_path / "cache"
    with loaded(path, cache, full_audit=True) as llm:
        shapes = llm.backend.shapes
    (kept,) = cache.rglob("audit-*.json")
    data = json.loads(kept.read_text())
    data["outcomes"][0] = {"name": "q", "classes": [], "impure": shapes, "forms": []}
    kept.write_text(json.dumps(data))
    with loaded(path, cache) as llm, pytest.raises(DeterminismError, match="row-pure for every kernel"):
        llm.generate("one two", SamplingParams(max_tokens=3))
