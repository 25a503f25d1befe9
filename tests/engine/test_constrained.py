"""Constrained answers: in the shape, the same tokens whatever drafts, crowds or interrupts them, and the right odds."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any

import jsonschema
import numpy as np
import pytest

from tests.support.adversaries import FAMILY, adversaries, collect
from tests.support.chi_square import chi_square_p
from tests.support.fake_backend import FakeBackend
from tests.support.shapes import END, PERSON, VOCAB_SIZE, VOCABULARY, compiled
from tests.support.skipping import fake_setup
from verispec.backends.cost import FLAT_COST, CostTable
from verispec.backends.protocol import Pass, PassKind, Ticket
from verispec.config import EngineConfig
from verispec.constraints.positions import Position
from verispec.engine import Engine, Request
from verispec.errors import ConstraintError, InputError
from verispec.sampling import constraint
from verispec.spec.drafter import Drafter
from verispec.spec.grammar import GrammarDrafter
from verispec.spec.none import NoDrafter
from verispec.spec.registry import make_drafters
from verispec.spec.speculation import AUTO, Speculation
from verispec.spec.turn import SequenceView
from verispec.text.detokenizer import TextStream
from verispec.types import Accept, FinishReason, SampleOutput, SamplingParams

PROMPT = tuple(VOCABULARY.encode("tell me"))
SEEDS = range(6)
CHEAP = CostTable((1, 64), (1e-6, 1e-6), (0.0, 0.0))  # passes take no time: streams may wait for bursts
PARAMS = SamplingParams(schema=PERSON, max_tokens=64, temperature=1.0, seed=1)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "filters": {"top_k": 3, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "bias and a least length": {"logit_bias": {END: 50.0, 5: -9.0}, "min_tokens": 12},
    "alternatives": {"logprobs": 3},
    "no end token": {"ignore_eos": True},
}


def request(params: SamplingParams = PARAMS, method: str = "none", **fields: Any) -> Request:
    return Request(
        PROMPT, params, Speculation(method), eos_ids=(END,), grammar=compiled(params),
        text=partial(TextStream, VOCABULARY, params.stop), **fields,
    )  # fmt: skip


def engine(
    drafters: dict[str, Drafter] | None = None,
    *,
    backend: FakeBackend | None = None,
    cost: CostTable = FLAT_COST,
    **config: Any,
) -> Engine:
    backend = backend or FakeBackend(vocab_size=VOCAB_SIZE, num_masks=80, num_slots=512)
    sizes = {"num_slots": backend.limits.num_slots, **config}
    return Engine(
        backend, family=(*FAMILY, 32, 64), drafters=drafters or make_drafters(), default_drafter="none", cost=cost,
        config=EngineConfig(**sizes),
    )  # fmt: skip


@cache
def alone(params: SamplingParams = PARAMS, **fields: Any) -> SampleOutput:
    made = engine()
    made.add(request(params, **fields))
    (output,) = collect(made).values()
    return output


def in_shape(output: SampleOutput) -> None:
    assert output.error is None
    if output.finish_reason is FinishReason.STOP:
        jsonschema.validate(json.loads(output.text), PERSON)


@pytest.mark.parametrize("variant", VARIANTS)
def test_answers_are_in_the_shape_and_end_by_themselves(variant: str) -> None:
    outputs = [alone(replace(PARAMS, seed=seed, **VARIANTS[variant])) for seed in SEEDS]
    for output in outputs:
        in_shape(output)
    assert {o.finish_reason for o in outputs} == {FinishReason.STOP}
    assert variant in ("greedy", "filters") or len({o.digest for o in outputs}) == len(outputs)


@pytest.mark.parametrize("name", [*adversaries({}), "grammar", AUTO])
def test_no_drafter_and_no_tree_changes_a_bit(name: str) -> None:
    """Chains, trees and duplicates that leave the grammar and return to it, beside drafters that fail."""
    expected: dict[int, list[int]] = {}
    made = engine({**adversaries(expected, VOCAB_SIZE), "grammar": GrammarDrafter()}, max_draft=6)
    wanted = {}
    for i, variant in enumerate(VARIANTS):
        params = replace(PARAMS, seed=i, **VARIANTS[variant])
        wanted[made.add(request(params, name))] = found = alone(params)
        expected[i] = [*PROMPT, *found.token_ids]
    for (request_id, _), output in collect(made).items():
        assert output.digest == wanted[request_id].digest
        assert output.text == wanted[request_id].text


REGEX = "(ab|ac|b[cd]{1,2}){1,2}x?"
WORDS = {
    word for size in range(1, 8) for word in map("".join, product("abcdx", repeat=size)) if re.fullmatch(REGEX, word)
}
PREFIXES = {word[:size] for word in WORDS for size in range(len(word) + 1)}


def watched(made: Engine, params: SamplingParams) -> int:
    """Step to the end. After each step what is committed is the beginning of something that matches, and the committed
    constraint is that of a fresh walk over it. How many places were looked at."""
    count = 0
    while made.has_work:
        outputs = [event.output for event in made.step() if event.output is not None]
        assert all(output.text in WORDS for output in outputs if params.regex)
        for sequence in [each for live in made._live.values() for each in live]:
            ids = sequence.token_ids[len(PROMPT) :]
            place: Any = compiled(params).start((END,))
            for token_id in ids:
                place = place.after(token_id)
            assert sequence.constraint is not None
            assert np.array_equal(sequence.constraint.allowed, place.allowed)
            assert not params.regex or VOCABULARY.decode(ids) in PREFIXES
            count += 1
    return count


@pytest.mark.parametrize("params", [SamplingParams(regex=REGEX, temperature=1.0), PARAMS], ids=["regex", "schema"])
@pytest.mark.parametrize("name", [*adversaries({}), "grammar", AUTO])
def test_what_was_drafted_leaves_no_trace_in_the_committed_constraint(name: str, params: SamplingParams) -> None:
    """S13, with another matcher: all words of a regex, by Python's `re`."""
    expected: dict[int, list[int]] = {}
    made = engine({**adversaries(expected, VOCAB_SIZE), "grammar": GrammarDrafter()}, max_draft=6, max_burst=1)
    for i in range(8):
        each = replace(params, seed=i)
        made.add(request(each, name))
        expected[i] = [*PROMPT, *alone(each).token_ids]
    assert watched(made, params) > 0


def test_control_a_constraint_that_is_left_behind_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Position, "committed", lambda self, token_id: self)
    made = engine(max_burst=1)
    params = replace(PARAMS, schema={"const": "ab"})
    made.add(request(params))
    with pytest.raises(AssertionError):
        watched(made, params)


def test_the_grammar_drafts_beside_every_drafter_and_says_how_much() -> None:
    for method in ("grammar", "suffix", "decode", AUTO):
        made = engine()
        made.add(request(method=method))
        (output,) = collect(made).values()
        assert output.digest == alone().digest
        assert output.stats.chosen["grammar"] > 0, method
        assert output.stats.accepted_by.total() == output.stats.accepted
    unconstrained = engine()
    unconstrained.add(Request(PROMPT, SamplingParams(max_tokens=4), Speculation("grammar")))
    (output,) = collect(unconstrained).values()
    assert output.stats.no_draft_reason == "the answer may have any shape"


@pytest.mark.parametrize("method", ["none", "suffix", "decode", AUTO])
def test_a_crowd_and_preemption_change_nothing(method: str) -> None:
    """Constrained and free requests side by side, in too few slots."""
    free = SamplingParams(max_tokens=30, temperature=1.0)
    shaped = replace(PARAMS, schema={"type": "string", "minLength": 25, "maxLength": 35})
    made = engine(num_slots=70, max_running=8)
    wanted = {}
    for seed in range(9):
        params = replace(shaped if seed % 3 else free, seed=seed)
        one = request(params, method) if seed % 3 else Request(PROMPT, params, Speculation(method))
        wanted[made.add(one)] = one
    outputs = collect(made)
    preempted = [wanted[request_id] for (request_id, _), o in outputs.items() if o.stats.preemptions]
    assert any(one.grammar is not None for one in preempted)
    for (request_id, _), output in outputs.items():
        one = wanted[request_id]
        other = engine()
        other.add(replace(one, speculation=Speculation("none")))
        (found,) = collect(other).values()
        assert output.digest == found.digest


def test_output_so_far_is_followed_and_checked() -> None:
    whole = alone(replace(PARAMS, n=1))
    ids = whole.token_ids
    for cut in (1, len(ids) // 2, len(ids) - 1, len(ids)):
        rest = alone(committed_ids=(ids[:cut],))
        assert (*ids[:cut], *rest.token_ids) == ids
        assert (rest.text, rest.finish_reason) == (whole.text, whole.finish_reason)
    made = engine()
    with pytest.raises(InputError, match="breaks the request's constraint at token 1"):
        made.add(request(committed_ids=((ids[0], ids[0]),)))


def test_samples_share_a_grammar_and_nothing_else() -> None:
    made = engine()
    made.add(request(replace(PARAMS, n=4), "grammar"))
    outputs = collect(made)
    assert len({o.digest for o in outputs.values()}) == 4
    for (_, index), output in outputs.items():
        in_shape(output)
        assert output.digest == alone(first_sample=index).digest


class Deaf(FakeBackend):
    """Ignores masks: the control."""

    def submit(self, pass_: Pass) -> Ticket:
        return super().submit(replace(pass_, rows=replace(pass_.rows, masks=None)))


def test_control_a_backend_that_ignores_masks_is_found_out() -> None:
    made = engine(backend=Deaf(vocab_size=VOCAB_SIZE, num_masks=80))
    made.add(request())
    (output,) = collect(made).values()
    assert output.finish_reason is FinishReason.ERROR
    assert "does not allow token" in (output.error or "")


class _Broken:
    """A grammar that allows everything, and cannot be followed behind its third token, or behind `most` of them."""

    is_complete, is_exhausted, forced_ids = False, False, ()

    def __init__(self, num_taken: int = 0, most: int = 3) -> None:
        self._num_taken, self._most = num_taken, most

    def start(self, stop_ids: object) -> _Broken:
        return self

    @property
    def allowed(self) -> np.ndarray:
        if self._num_taken == self._most:
            raise ConstraintError("the grammar", "is too complex here")
        return np.full(-(-VOCAB_SIZE // 32), 2**32 - 1, np.uint32)

    def after(self, token_id: int) -> _Broken:
        return _Broken(self._num_taken + 1, self._most)

    committed = after


@pytest.mark.parametrize("method", ["none", "perfect", "grammar"])
def test_a_grammar_that_fails_ends_its_request_alone(method: str, caplog: pytest.LogCaptureFixture) -> None:
    others = adversaries({0: [*PROMPT, *range(1, 30)], 1: [*PROMPT, *alone().token_ids]}, VOCAB_SIZE)
    made = engine({**others, "grammar": GrammarDrafter()})
    broken = made.add(replace(request(method=method), grammar=_Broken()))
    sound = made.add(request(method=method))
    outputs = collect(made)
    assert outputs[broken, 0].finish_reason is FinishReason.ERROR
    assert "too complex" in (outputs[broken, 0].error or "")
    assert len(outputs[broken, 0].token_ids) == 3
    assert outputs[sound, 0].digest == alone().digest
    assert "drafter grammar failed" not in caplog.text  # it is not the drafter's failure


def test_a_grammar_that_fails_before_the_first_token_is_refused() -> None:
    """Nobody else's pass is built with it."""
    made = engine({"none": NoDrafter()})
    sound = made.add(request())
    with pytest.raises(ConstraintError, match=r"^schema: cannot be followed: is too complex here"):
        made.add(replace(request(), grammar=_Broken(most=0)))
    assert collect(made)[sound, 0].digest == alone().digest


@pytest.mark.parametrize("follows", [True, False])
def test_free_requests_go_on_bursting_beside_constrained_ones(follows: bool) -> None:
    backend = FakeBackend(vocab_size=VOCAB_SIZE, num_masks=80, follows=follows)
    made = engine(backend=backend, cost=CHEAP, max_burst=8)
    made.add(request())
    for seed in range(6):
        params = SamplingParams(max_tokens=40, temperature=1.0, seed=seed)
        made.add(Request(PROMPT, params, Speculation("none"), is_streamed=False))
    collect(made)
    bursts = [p for p in backend.passes if p.burst and p.burst.num_rounds and p.rows.masks is not None]
    assert bursts
    assert any(p.burst.follow for p in bursts) is follows  # type: ignore[union-attr]


def test_bursts_under_constraints_change_nothing() -> None:
    """Masks are given between rounds, alone and beside free requests; the reference has a round in each step."""
    backend = FakeBackend(vocab_size=VOCAB_SIZE, num_masks=80)
    made, single = engine(backend=backend, cost=CHEAP, max_burst=8), engine(max_burst=1)
    for i, variant in enumerate(sorted(VARIANTS.keys() - {"alternatives"})):  # they need the host after each round
        constrained = replace(request(replace(PARAMS, seed=i % 2, **VARIANTS[variant])), is_streamed=False)
        free = Request(PROMPT, SamplingParams(max_tokens=30, temperature=1.0, seed=i), Speculation("none"))
        for one in (constrained, free, constrained):
            assert made.add(one) == single.add(one)
    outputs, expected = collect(made), collect(single)
    assert {key: o.digest for key, o in outputs.items()} == {key: o.digest for key, o in expected.items()}
    assert {o.finish_reason for o in outputs.values()} == {FinishReason.STOP, FinishReason.LENGTH}
    passes = [(p.burst, p.rows.masks) for p in backend.passes if p.burst is not None and p.rows.masks is not None]
    assert sum(int(burst.rounds[masks[burst.rows] > 0].sum()) for burst, masks in passes) > 50


@pytest.mark.parametrize(("method", "least"), [("grammar", 60), ("suffix", 4), ("none", 200)])
def test_who_has_nothing_to_draft_goes_on_until_the_grammar_leaves_few_tokens(
    method: str, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text in bursts, keys in drafts; without drafts all in bursts."""
    monkeypatch.setattr(constraint, "_FEW", 12)
    num_rounds = 0
    schema = {"type": "array", "minItems": 3, "items": {"type": "object", "required": ["name", "age"], "properties": {
        "name": {"type": "string", "minLength": 12}, "age": {"type": "integer"}}}}  # fmt: skip
    for seed in range(4):
        params = replace(PARAMS, schema=schema, max_tokens=90, seed=seed)
        backend = FakeBackend(vocab_size=VOCAB_SIZE, num_masks=80)
        made = engine(backend=backend, cost=CHEAP, max_burst=8)
        made.add(replace(request(params, method), is_streamed=False))
        (output,) = collect(made).values()
        assert output.digest == alone(params).digest
        assert method == "none" or output.stats.accepted_by["grammar"] > 5
        assert output.stats.passes + output.stats.accepted >= len(output.token_ids)
        num_rounds += sum(int(p.burst.rounds.max()) for p in backend.passes if p.burst and p.burst.follow)
        for _ in range(2):  # beside another one it would idle behind the end of its burst
            made.add(replace(request(params, method), is_streamed=False))
        backend.passes.clear()
        assert {o.digest for o in collect(made).values()} == {output.digest}
        assert bool(_bursts_together(backend)) is (method == "none")
    assert num_rounds > least


@pytest.mark.parametrize("method", ["grammar", "suffix"])
def test_where_no_draft_can_pay_all_go_on_in_bursts_together(method: str) -> None:
    """Each row takes its own time. Nobody idles: rounds do not end where the grammar leaves few tokens."""
    backend = FakeBackend(vocab_size=VOCAB_SIZE, num_masks=80)
    made = engine(backend=backend, cost=CostTable((1, 64), (1e-6, 64e-6), (0.0, 0.0)), max_burst=8)
    for _ in range(3):
        made.add(replace(request(method=method), is_streamed=False))
    outputs = collect(made)
    assert {o.digest for o in outputs.values()} == {alone().digest}
    assert all(o.stats.drafted == 0 for o in outputs.values())
    assert all("not predicted to pay" in (o.stats.no_draft_reason or "") for o in outputs.values())
    assert max(int(p.burst.rounds.max()) for p in _bursts_together(backend) if p.burst) > 4


class _Asked(GrammarDrafter):
    """Notes for whom it is asked, by the number of tokens they have."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[int] = []

    def state(self, sequence: SequenceView) -> Any:
        self.lengths.append(len(sequence.token_ids))
        return super().state(sequence)


def test_who_was_not_asked_under_load_is_asked_when_others_have_left() -> None:
    """Up to 4 rows take as long as one, from 8 on each takes its own time: beside 7 others no draft can pay."""
    steep = CostTable((1, 4, 8, 64), (1e-6, 1e-6, 2e-6, 16e-6), (0.0,) * 4)
    lengths = {}
    for costs in (steep, CHEAP):  # control: where rows cost nothing all are asked from the start
        drafter = _Asked()
        made = engine({"none": NoDrafter(), "grammar": drafter}, cost=costs, max_burst=8)
        for seed in range(7):
            made.add(replace(request(replace(PARAMS, seed=seed, max_tokens=20), "grammar"), is_streamed=False))
        params = replace(PARAMS, schema={"type": "array", "items": PERSON, "minItems": 9}, max_tokens=120)
        last = made.add(replace(request(params, "grammar"), is_streamed=False))
        assert collect(made)[last, 0].digest == alone(params).digest
        lengths[costs is steep] = [length - len(PROMPT) for length in drafter.lengths]
    assert lengths[False].count(0) >= 8
    assert 20 <= min(lengths[True]) <= 20 + 32, "as soon as the others have gone, or a rest later"


def test_a_step_in_which_the_host_was_held_up_is_forgotten() -> None:
    """Where nothing is drafted what the host takes is not measured again."""
    made = engine(cost=CHEAP, max_burst=8)
    made._policy.rates.host_seconds = 5e-6  # five times as long as a pass
    params = replace(PARAMS, schema={"type": "array", "items": PERSON, "minItems": 30}, max_tokens=200)
    made.add(replace(request(params, "grammar"), is_streamed=False))
    (output,) = collect(made).values()
    assert output.digest == alone(params).digest
    assert 0 < output.stats.drafted < 150


def _bursts_together(backend: FakeBackend) -> list[Pass]:
    return [p for p in backend.passes if p.burst and p.burst.follow and len(p.burst.rows) > 1]


class Alike(FakeBackend):
    """Its fast passes give the bits of canonical ones."""

    def submit(self, pass_: Pass) -> Ticket:
        return super().submit(replace(pass_, kind=PassKind.CANONICAL))


@pytest.mark.parametrize(
    "speculation", [Speculation("grammar"), Speculation.of("model", tree="branch:2,2", accept="recursive")]
)
def test_the_odds_are_the_models_own_within_the_mask(speculation: Speculation) -> None:
    """At each step p / sum of p over what is allowed; the control: the odds of whole texts, renormalised at the end.

    Under a rule by probabilities draft and target are both within the mask.
    """
    backend = Alike(vocab_size=VOCAB_SIZE, num_masks=400, num_slots=2048, num_stores=2, model_seed=57)
    is_free = speculation.accept is not Accept.MATCH
    params = SamplingParams(
        regex="(a|b(c|d|e)|f)", max_tokens=4, temperature=1.0, seed=5, n=600, deterministic=not is_free
    )
    made = engine(make_drafters(fake_setup(backend)), backend=backend)
    made.add(replace(request(params), speculation=speculation))
    outputs = collect(made).values()
    assert not is_free or sum(o.stats.accepted for o in outputs) > 100
    texts = [output.text for output in outputs]
    odds = {text: _odds(backend, text) for text in ("a", "bc", "bd", "be", "f")}
    counts = np.array([texts.count(text) for text in odds])
    assert counts.sum() == len(texts)
    stepwise = np.array([steps["allowed"] for steps in odds.values()])
    whole = np.array([steps["raw"] for steps in odds.values()])
    assert chi_square_p(counts, stepwise) > 1e-3
    assert chi_square_p(counts, whole / whole.sum()) < 1e-6


def _odds(backend: FakeBackend, text: str) -> dict[str, float]:
    """Of a text: by the model's own probabilities, and by those within what each step allows."""
    allowed = {"": "abf", "b": "cde"}
    found = {"raw": 1.0, "allowed": 1.0}
    for i, letter in enumerate(text):
        if text[:i] in allowed:
            p = {c: _probability(backend, text[:i], c) for c in allowed[text[:i]]}
            found["raw"] *= p[letter]
            found["allowed"] *= p[letter] / sum(p.values())
    return found


def _probability(backend: FakeBackend, before: str, letter: str) -> float:
    ids = [*PROMPT, *VOCABULARY.encode(before), *VOCABULARY.encode(letter)]
    made = engine(backend=backend)
    made.add(Request(ids, SamplingParams(max_tokens=0, prompt_logprobs=0), Speculation("none")))
    (output,) = collect(made).values()
    assert output.prompt_logprobs is not None
    return float(np.exp(output.prompt_logprobs[-1].logprob))
