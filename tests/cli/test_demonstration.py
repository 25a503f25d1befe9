"""The demonstration of the promise: its situations really occur, and it can fail."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.support import sabotage as spoils
from tests.support.sabotage import Spoil, sabotage
from tests.support.tiny_llm import loaded, write_model
from verispec.backends.cost import FLAT_COST
from verispec.backends.protocol import DrawResult, Pass, PassKind
from verispec.cli.demonstration import (
    ALONE,
    CHUNKED,
    FIRST,
    LAST,
    MIDDLE,
    PREEMPTED,
    WARM,
    Case,
    Demonstration,
    compare,
)
from verispec.errors import InputError, VerispecError
from verispec.llm import LLM
from verispec.types import FinishReason, SampleOutput, SamplingParams, SequenceStats, TokenLogprob, TokenLogprobs

pytestmark = pytest.mark.slow

PROMPT = "one two one two one"
PARAMS = SamplingParams(max_tokens=24, temperature=0.7, seed=4)
CROWD = 5


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("tiny")
    with loaded(write_model(folder / "model.gguf"), folder, kv_slots=2000, threads=1) as llm:
        llm.calibration = replace(llm.calibration, cost=FLAT_COST)  # what is drafted must not depend on timing
        yield llm


@pytest.fixture(scope="module")
def cases(llm: LLM) -> list[Case]:
    return show(llm)


def show(llm: LLM, prompt: str = PROMPT, params: SamplingParams = PARAMS) -> list[Case]:
    demonstration = Demonstration(llm, prompt, params, crowd=CROWD)
    cases = list(demonstration.cases())
    assert len(cases) == demonstration.num_cases
    return cases


def test_every_situation_takes_place_and_gives_the_bits_of_the_reference(llm: LLM, cases: list[Case]) -> None:
    reference = cases[0]
    assert (reference.name, reference.drafter) == (ALONE, "none")
    assert reference.run.output.digest == llm.generate(PROMPT, PARAMS, drafter="none")[0].digest
    assert all(case.is_equal and case.run.output.digest == reference.run.output.digest for case in cases)
    assert all(case.took_place for case in cases)
    by_name = {(case.name, case.drafter): case.run for case in cases}
    num_prompt = reference.run.output.prompt_len
    assert reference.run.output.stats.cached_tokens == 0
    assert by_name[WARM, "none"].output.stats.cached_tokens == num_prompt - 1
    assert by_name[PREEMPTED, "none"].output.stats.preemptions > 0
    assert by_name[CHUNKED, "none"].num_steps_to_first > reference.run.num_steps_to_first == 1
    for name in (MIDDLE, FIRST, LAST):
        assert by_name[name, "none"].num_beside == CROWD


@pytest.mark.parametrize("drafter", ["none", "suffix", "decode", "auto"])  # the others lack a menu and a second model
def test_every_drafter_is_shown_alone_and_in_the_crowd(cases: list[Case], drafter: str) -> None:
    runs = {case.name: case.run for case in cases if case.drafter == drafter}
    assert {ALONE, MIDDLE} <= set(runs)
    assert runs[MIDDLE].num_beside == CROWD
    assert (runs[ALONE].output.stats.drafted > 0) == (drafter != "none")


def test_preemption_is_forced_however_short_the_answer(llm: LLM) -> None:
    ids = llm.generate(PROMPT, PARAMS)[0].token_ids
    early = next(i for i in range(3, len(ids)) if ids[i] not in ids[:i])
    cases = show(llm, params=replace(PARAMS, stop_ids=(ids[early],)))
    (preempted,) = (case for case in cases if case.name == PREEMPTED)
    assert len(preempted.run.output.token_ids) == early + 1
    assert preempted.run.output.finish_reason is FinishReason.STOP
    assert preempted.took_place
    assert preempted.is_equal


def test_a_prompt_of_many_chunks(llm: LLM) -> None:
    cases = show(llm, "xyz " * 40)
    assert cases[0].run.num_steps_to_first > 1
    assert all(case.is_equal and case.took_place for case in cases)


def test_what_cannot_be_brought_about_is_said(llm: LLM) -> None:
    """One token after one token: nothing to preempt, nothing to cut, nothing to draft."""
    cases = show(llm, "a", replace(PARAMS, max_tokens=1))
    assert cases[0].run.output.prompt_len == 1
    assert {case.name for case in cases if not case.took_place} >= {WARM, PREEMPTED, CHUNKED}
    assert all(case.is_equal for case in cases)


@pytest.mark.parametrize("spoil", [spoils.by_index, spoils.by_neighbours])
def test_control_a_backend_that_breaks_the_promise_is_found_out(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, spoil: Spoil
) -> None:
    sabotage(monkeypatch, PassKind.CANONICAL, spoil)
    different = {case.name for case in show(llm) if not case.is_equal}
    assert MIDDLE in different
    assert WARM not in different or spoil is spoils.by_index  # its prompt has another row


def test_a_failure_of_one_case_is_a_difference(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_token(pass_: Pass, drawn: DrawResult) -> DrawResult:
        return drawn._replace(token_ids=drawn.token_ids - 10_000 * (spoils.num_sequences(pass_) > 1))

    sabotage(monkeypatch, PassKind.CANONICAL, no_token)
    failed = {case.name for case in show(llm) if case.run.output.error is not None and not case.is_equal}
    assert {MIDDLE, FIRST} <= failed
    assert not failed & {ALONE, WARM, CHUNKED}


def test_a_machine_that_breaks_down_behind_the_reference(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = itertools.count()
    sabotage(monkeypatch, PassKind.CANONICAL, lambda pass_, drawn: DrawResult(
        drawn.token_ids - 10_000 * (next(passes) > 30), drawn.logprobs
    ))  # fmt: skip
    reference, *others = show(llm)
    assert reference.is_equal
    assert not any(case.is_equal for case in others)


def test_a_reference_that_fails_ends_the_demonstration(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    sabotage(monkeypatch, PassKind.CANONICAL, lambda pass_, drawn: drawn._replace(token_ids=drawn.token_ids - 10_000))
    with pytest.raises(VerispecError, match="no token can be drawn"):
        show(llm)


def test_fast_passes_that_depend_on_the_crowd(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    sabotage(monkeypatch, PassKind.FAST, spoils.shifted_by_neighbours)
    demonstration = Demonstration(llm, PROMPT, PARAMS, crowd=CROWD)
    alone, *crowds = demonstration.fast_cases()
    assert demonstration.num_fast_cases == 1 + len(crowds)
    assert alone.comparison.is_equal
    assert [case.num_others for case in crowds] == [1, 2, CROWD, CROWD + 1]
    for case in crowds:
        found = case.comparison
        assert case.run.num_beside == case.num_others
        assert (found.num_compared, found.num_different, found.first_different) == (24, 23, 1)  # the first is canonical
        assert found.largest_difference == pytest.approx(case.num_others, abs=1e-3)
        assert found.first_other_token is None


def test_native_passes_are_all_pure_and_those_of_a_library_are_not(
    native_kernels: None, llm: LLM, tmp_path_factory: pytest.TempPathFactory
) -> None:
    demonstration = Demonstration(llm, PROMPT, PARAMS, crowd=CROWD)
    assert demonstration.has_only_pure_passes
    assert all(case.comparison.is_equal for case in demonstration.fast_cases())
    assert [row.num_others for row in demonstration.library_rows()] == [1, 2, CROWD, CROWD + 1]
    folder = tmp_path_factory.mktemp("numpy")
    with loaded(write_model(folder / "model.gguf"), folder, kv_slots=500, threads=1, backend="numpy") as other:
        assert not Demonstration(other, PROMPT, PARAMS).has_only_pure_passes


def test_fast_passes_that_change_tokens(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    sabotage(monkeypatch, PassKind.FAST, spoils.other_tokens)
    _, *crowds = Demonstration(llm, PROMPT, PARAMS, crowd=1).fast_cases()
    assert [case.comparison.first_other_token for case in crowds] == [1, 1]
    assert crowds[0].comparison.num_compared == 1


def test_fast_passes_leave_the_deterministic_cases_alone(
    llm: LLM, cases: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(monkeypatch, PassKind.FAST, spoils.shifted_by_neighbours)
    assert {case.run.output.digest for case in show(llm)} == {cases[0].run.output.digest}


def output(*entries: tuple[int, float]) -> SampleOutput:
    logprobs = TokenLogprobs.of(TokenLogprob(token_id, value) for token_id, value in entries)
    return SampleOutput(0, 1, logprobs, "", FinishReason.LENGTH, 0, SequenceStats())


def test_outputs_are_compared_up_to_the_first_other_token() -> None:
    one = output((1, -1.0), (2, -2.0), (3, -3.0), (4, -4.0))
    assert compare(one, one).is_equal
    bits = compare(output((1, -1.0), (2, -2.5), (3, -3.25), (4, -4.0)), one)
    assert (bits.num_compared, bits.num_different, bits.first_different, bits.largest_difference) == (4, 2, 1, 0.5)
    assert bits.first_other_token is None
    tokens = compare(output((1, -1.0), (2, -2.0), (9, -3.5), (4, -4.5)), one)
    assert (tokens.num_compared, tokens.num_different, tokens.first_other_token) == (2, 0, 2)
    assert not tokens.is_equal
    assert compare(output((1, -1.0)), one).first_other_token == 1
    assert not compare(output((1, 0.0)), output((1, -0.0))).is_equal  # bits, not values


def test_the_llm_is_usable_before_meanwhile_and_after(llm: LLM) -> None:
    """Its engine's cache shares the K/V store with the demonstration's engines: a stale hit would give other tokens."""
    before = [llm.generate(text, PARAMS)[0].digest for text in (PROMPT, "x" * 60)]
    cases = Demonstration(llm, "y" * 80, PARAMS, crowd=CROWD).cases()
    for _ in range(4):
        next(cases)
    cases.close()  # type: ignore[attr-defined]
    assert [llm.generate(text, PARAMS)[0].digest for text in (PROMPT, "x" * 60)] == before
    assert not llm.engine.has_work


def test_what_is_refused(llm: LLM) -> None:
    with pytest.raises(InputError, match="a seed and one sample"):
        Demonstration(llm, PROMPT, replace(PARAMS, seed=None))
    with pytest.raises(InputError, match="a seed and one sample"):
        Demonstration(llm, PROMPT, replace(PARAMS, n=2))
    with pytest.raises(InputError, match="crowd must be at least 1"):
        Demonstration(llm, PROMPT, PARAMS, crowd=0)
    with pytest.raises(InputError, match="the prompt has"):
        Demonstration(llm, "x" * 300, PARAMS)
