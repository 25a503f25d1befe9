"""The model's own text, and views scored on it, against passes of one token at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.passes import NO_UPDATE, RowsBuilder, Tape, bind, run, run_logprobs
from tests.support.tunable import FAMILY, prompts, tiny_backend
from verispec.backends.numpy_backend import NumpyBackend
from verispec.backends.protocol import FULL_VIEW, DrawWanted, View, Wanted
from verispec.errors import InputError
from verispec.sampling import draw
from verispec.sampling.rows import SampleKey, plain_rows
from verispec.tuning import agreement, own_text
from verispec.tuning.agreement import Evaluator
from verispec.tuning.own_text import SEED, Beginnings, Line, Runner, first_free_slot, token_prompts, write_text
from verispec.types import SamplingParams

SHAPE = FAMILY[0]
VIEWS = [
    View.without((1,), (2,)),
    View.without((1, 3), (2, 4)),
    View.without(range(6), range(6)),
]


def written(backend: NumpyBackend, num_tokens: int = 40, eos_ids: tuple[int, ...] = ()) -> tuple[Line, ...]:
    return write_text(Runner(backend, FAMILY), prompts(1), num_tokens=num_tokens, eos_ids=eos_ids)


@pytest.fixture(scope="module")
def backend() -> NumpyBackend:
    return tiny_backend()


@pytest.fixture
def lines(backend: NumpyBackend) -> tuple[Line, ...]:
    return written(backend)


@pytest.fixture
def evaluator(backend: NumpyBackend, lines: tuple[Line, ...]) -> Evaluator:
    return Evaluator(Runner(backend, FAMILY), lines)


# --- the text


def test_text_is_what_plain_decoding_gives(lines: tuple[Line, ...]) -> None:
    """Token by token on another backend; each line is greedy, or drawn with the noise of its sample."""
    kinds = []
    for line in lines:
        tape = Tape(tiny_backend(), seq_row=1, first_slot=0)
        logprobs = tape.feed(line.token_ids[: line.prompt_len], shape=64)[-1:]
        greedy, sampled = [], []
        for t in range(line.prompt_len, len(line.token_ids)):
            rows = plain_rows(SamplingParams(temperature=1.0), SampleKey(SEED, line.seq_row), [t])
            greedy.append(int(logprobs.argmax()))
            sampled.append(int(draw.draw(np, logprobs, rows).token_ids[0]))
            logprobs = tape.feed([line.token_ids[t]], shape=SHAPE)
        own = list(line.token_ids[line.prompt_len :])
        assert own in (greedy, sampled)
        kinds.append(own == greedy)
    assert kinds == [True, True, False, False, False]  # four prompts, and the first one again
    assert {len(line.token_ids) - line.prompt_len for line in lines} == {8}


def test_text_is_the_same_every_time(lines: tuple[Line, ...]) -> None:
    assert written(tiny_backend()) == lines


def test_text_does_not_end(backend: NumpyBackend, lines: tuple[Line, ...]) -> None:
    usual = {t for line in lines for t in line.token_ids[line.prompt_len :]}
    found = {t for line in written(backend, eos_ids=tuple(usual)) for t in line.token_ids[line.prompt_len :]}
    assert usual
    assert not usual & found


def test_each_prompt_comes_at_both_temperatures() -> None:
    lines = written(tiny_backend(), num_tokens=80)
    assert len(lines) == 8
    for first, second in zip(lines[:4], lines[4:], strict=True):
        assert first.token_ids[: first.prompt_len] == second.token_ids[: second.prompt_len]
        assert first.token_ids != second.token_ids


def test_text_fits_what_there_is() -> None:
    lines = written(tiny_backend(num_seq_rows=2, num_slots=60), num_tokens=1000)
    assert len(lines) == 2
    assert first_free_slot(lines) + SHAPE <= 60 + 2
    assert len(lines[0].token_ids) > lines[0].prompt_len
    long = written(tiny_backend(num_seq_rows=1, num_slots=4000), num_tokens=1000)
    assert len(long[0].token_ids) == 128  # the context


def test_too_few_slots_are_refused_with_the_number_that_is_needed() -> None:
    with pytest.raises(InputError, match=r"tuning needs 64 K/V slots and a context of 15; there are 50 and 128"):
        written(tiny_backend(num_slots=50), num_tokens=40)
    with pytest.raises(InputError, match="made nothing of the built-in prompts"):
        write_text(Runner(tiny_backend(), FAMILY), [], num_tokens=8, eos_ids=())


def test_a_model_of_nan_is_refused() -> None:
    with pytest.raises(InputError, match="NaN"):
        written(tiny_backend(nan_in="layers.2.down"))


def test_prompts_take_turns() -> None:
    both = Beginnings(("q", "r"), ("t", "u"))
    assert token_prompts(both, lambda text: [1], lambda text: [2]) == ((2,), (1,), (2,), (1,))
    assert token_prompts(both, lambda text: [], lambda text: [2]) == ((2,), (2,))


def test_search_and_report_share_no_prompt() -> None:
    search, report = own_text.SEARCH_BEGINNINGS, own_text.REPORT_BEGINNINGS
    assert len({*search.questions, *search.texts, *report.questions, *report.texts}) == 32


# --- views on it


def one_by_one(line: Line, position: int, view: View) -> tuple[np.ndarray, int]:
    """The log-probabilities and the draw at temperature 1 of one row, computed alone on a backend of its own."""
    tape = Tape(tiny_backend(), seq_row=1, first_slot=0)
    tape.feed(line.token_ids[:position], shape=64)
    tape = replace(tape, view=view)

    def row() -> RowsBuilder:
        rows = RowsBuilder()
        slot = tape.slot(position)
        token_id = line.token_ids[position]
        rows.add(token_id=token_id, position=position, slot=slot, seq_row=1, prefix_len=position, tail=(slot,))
        return rows

    logprobs = run_logprobs(tape, row(), [0], NO_UPDATE, SHAPE)[0]
    bind(tape.backend, line.seq_row, SamplingParams(temperature=1.0), seed=SEED, sample_index=line.seq_row)
    drawn = run(tape, row(), Wanted(draw=DrawWanted(np.zeros(1, np.int32))), NO_UPDATE, SHAPE).draw
    assert drawn is not None
    return logprobs, int(drawn.token_ids[0])


def test_scores_equal_those_of_rows_computed_one_by_one(lines: tuple[Line, ...], evaluator: Evaluator) -> None:
    places = [(line, p) for line in lines for p in range(line.prompt_len, len(line.token_ids))][::3]
    short = [Line(line.token_ids[: p + 1], p, line.seq_row, line.first_slot) for line, p in places]
    few = Evaluator(evaluator._runner, short)  # the same K/V, one row of each place
    assert few.num_tokens == len(places)
    full = [one_by_one(line, p, FULL_VIEW) for line, p in places]
    for view in VIEWS[:2]:
        found = [one_by_one(line, p, view) for line, p in places]
        greedy = [f.argmax() == v.argmax() for (f, _), (v, _) in zip(full, found, strict=True)]
        sampled = [f == v for (_, f), (_, v) in zip(full, found, strict=True)]
        left = [
            min(1.0, np.exp(v[f.argmax()] - f[f.argmax()])) for (f, _), (v, _) in zip(full, found, strict=True)
        ]  # fmt: skip
        assert few.agreement(view) == (np.mean(greedy), np.mean(sampled))
        assert few.soft_agreement(view) == pytest.approx(np.mean(left), rel=1e-5)


def test_skipping_nothing_agrees_always(evaluator: Evaluator) -> None:
    assert evaluator.agreement(FULL_VIEW) == (1.0, 1.0)
    assert evaluator.soft_agreement(FULL_VIEW) == 1.0


def test_skipping_something_does_not(evaluator: Evaluator) -> None:
    few, more, all_ = (evaluator.agreement(view).greedy for view in VIEWS)
    assert 1 > few > more > all_
    assert 1 > evaluator.soft_agreement(VIEWS[0]) > evaluator.soft_agreement(VIEWS[2])


def kv_of(backend: NumpyBackend, lines: tuple[Line, ...]) -> bytes:
    slots = np.array([line.first_slot + p for line in lines for p in range(len(line.token_ids) - 1)])
    return b"".join(part.tobytes() for part in backend.kv(0, slots))


def test_the_full_models_kv_stays(backend: NumpyBackend, lines: tuple[Line, ...]) -> None:
    before = kv_of(backend, lines)
    evaluator = Evaluator(Runner(backend, FAMILY), lines)
    for view in VIEWS:
        evaluator.agreement(view)
        evaluator.soft_agreement(view)
    assert kv_of(backend, lines) == before


def test_the_check_of_kv_can_fail(
    backend: NumpyBackend, lines: tuple[Line, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scratch slots inside the text are noticed, in the K/V and in the scores."""
    before, sound = kv_of(backend, lines), Evaluator(Runner(backend, FAMILY), lines)
    expected = sound.agreement(VIEWS[1])
    monkeypatch.setattr(agreement, "first_free_slot", lambda lines: lines[0].first_slot)
    Evaluator(Runner(backend, FAMILY), lines).agreement(VIEWS[2])
    assert kv_of(backend, lines) != before
    assert sound.agreement(VIEWS[1]) != expected


def test_scores_do_not_depend_on_how_rows_are_cut(backend: NumpyBackend, lines: tuple[Line, ...]) -> None:
    scores = []
    for family in ((16,), (64,), ()):
        evaluator = Evaluator(Runner(backend, family), lines)
        scores.append([evaluator.agreement(view) for view in VIEWS])
    assert scores[0] == scores[1] == scores[2]


def test_a_view_is_computed_once(evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch) -> None:
    first = evaluator.soft_agreement(VIEWS[0])
    monkeypatch.setattr(NumpyBackend, "submit", None)
    assert evaluator.soft_agreement(VIEWS[0]) == first
