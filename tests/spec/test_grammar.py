"""The grammar's drafts: forced tokens, and choices as they were made before. They change speed, never an answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.engine.test_constrained import END, engine, request
from tests.support.adversaries import collect
from tests.support.shapes import VOCABULARY, compiled
from verispec.sampling import constraint
from verispec.sampling.constraint import Constraint
from verispec.spec.drafter import Refusal
from verispec.spec.grammar import GrammarDrafter
from verispec.spec.turn import Choice, Turn
from verispec.types import Draft, SamplingParams, Verdict

INT = {"type": "integer", "minimum": 0, "maximum": 9}
COLOUR = {"enum": ["red", "rose", "blue"]}
SHAPES: dict[str, dict[str, Any]] = {
    "numbers": {"schema": {"type": "array", "items": {"type": "number"}, "minItems": 5}},
    "words": {"schema": {"type": "array", "items": COLOUR, "minItems": 6}},
    "objects": {"schema": {"type": "array", "minItems": 4, "items": {"type": "object", "properties": {"age": INT}}}},
    "text": {"schema": {"type": "string"}},
    "one letter or another": {"regex": "(ab?){12,}"},
}


@dataclass
class Answer:
    """What the drafter sees of a sequence."""

    token_ids: list[int]
    constraint: Constraint
    sequence_id: int = 0

    @classmethod
    def begun(cls, **shape: Any) -> Answer:
        return cls([1], compiled(SamplingParams(**shape)).start((END,)))

    def write(self, drafter: GrammarDrafter, text: str) -> None:
        """Token by token, as without drafts."""
        for token_id in VOCABULARY.encode(text):
            drafter.state(self)  # type: ignore[arg-type]
            self.token_ids = [*self.token_ids, token_id]
            self.constraint = self.constraint.committed(token_id)

    def drafted(self, drafter: GrammarDrafter, num_nodes: int = 32) -> str:
        state = drafter.state(self)  # type: ignore[arg-type]
        if isinstance(state, Refusal):
            return ""
        assert len(state) <= GrammarDrafter.MAX_DRAFT
        (draft,) = drafter.draft([self.turn(num_nodes)])
        return VOCABULARY.decode(draft.token_ids)

    def turn(self, num_nodes: int) -> Turn:
        return Turn(self, 0, 0, True, 0, 1, True, [], 0, (), choice=Choice("grammar", num_nodes))  # type: ignore[arg-type]


def test_forced_text_is_drafted_and_choices_as_they_were_made_before() -> None:
    drafter, answer = GrammarDrafter(), Answer.begun(**SHAPES["words"])
    assert answer.drafted(drafter) == '["'
    answer.write(drafter, '["r')
    assert answer.drafted(drafter) == ""  # nothing was chosen yet
    answer.write(drafter, 'ose", "')
    assert answer.drafted(drafter).startswith('rose", "rose')
    assert answer.drafted(drafter, num_nodes=2) == "ro"
    answer.write(drafter, 'blue", "')
    assert answer.drafted(drafter).startswith('blue", "')  # the last time counts


def test_the_last_token_of_an_answer_needs_no_row() -> None:
    """It is drawn at the row before; a row of its own would draw what nobody reads."""
    for regex, drafted in {"a": "", "ab": "a", "abc|abd": "ab", "ab+": "ab"}.items():
        assert Answer.begun(regex=regex).drafted(GrammarDrafter()) == drafted
    made = engine()
    made.add(request(SamplingParams(regex="name: true", max_tokens=20), "grammar"))
    (output,) = collect(made).values()
    assert output.text == "name: true"
    assert (output.stats.passes, output.stats.drafted) == (1, len(output.token_ids) - 1)


def test_what_follows_the_same_token_counts_before_what_was_chosen_last() -> None:
    drafter, answer = GrammarDrafter(), Answer.begun(regex="[ab]{20}")
    answer.write(drafter, "aab")
    assert answer.drafted(drafter) == "bbbb"  # nothing has followed a b yet
    answer.write(drafter, "aab")
    assert answer.drafted(drafter) == "abab"


def test_choices_among_many_are_left_to_other_drafters(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for few in (2, 1):
        monkeypatch.setattr(constraint, "_FEW", few)
        drafter, answer = GrammarDrafter(), Answer.begun(regex="[ab]{20}")
        answer.write(drafter, "aa")
        found.append(answer.drafted(drafter))
    assert found == ["aaaa", ""]


def test_choices_that_come_out_otherwise_are_promised_less_and_forced_ones_no_less() -> None:
    drafter, answer = GrammarDrafter(), Answer.begun(regex="[ab]{200}")
    answer.write(drafter, "ab")
    before = drafter.curves(drafter.state(answer))[0].levels[0].tokens  # type: ignore[arg-type]
    for letter in "aab" * 20:
        turn = answer.turn(1)
        turn.draft = Draft.chain(VOCABULARY.encode(answer.drafted(drafter))[:1])
        turn.verdict = Verdict((), 0)
        drafter.observe(turn)
        answer.write(drafter, letter)
    assert drafter.curves(drafter.state(answer))[0].levels[0].tokens < before / 3  # type: ignore[arg-type]
    forced = drafter.state(replace(Answer.begun(**SHAPES["words"]), sequence_id=1))  # type: ignore[arg-type]
    assert drafter.curves(forced)[0].levels[0].tokens == GrammarDrafter().curves(forced)[0].levels[0].tokens


@pytest.mark.parametrize("shape", SHAPES)
def test_guesses_right_and_wrong_change_no_bit(shape: str) -> None:
    """A model with random weights chooses anew each time, so most guesses are wrong; a greedy one repeats itself."""
    drafted = accepted = 0
    for seed, temperature in enumerate((0.0, 1.0, 1.0, 1.0)):
        params = SamplingParams(**SHAPES[shape], max_tokens=48, temperature=temperature, seed=seed)
        digests = set()
        for method in ("none", "grammar", "suffix", "auto"):
            made = engine()
            made.add(request(params, method))
            (output,) = collect(made).values()
            digests.add(output.digest)
            if method == "grammar":
                drafted, accepted = drafted + output.stats.drafted, accepted + output.stats.accepted
        assert len(digests) == 1
    assert shape == "text" or drafted > accepted > 0


def test_what_was_chosen_is_forgotten_with_its_answer() -> None:
    drafter = GrammarDrafter()
    answer = Answer.begun(regex="[ab]{9}")
    other = replace(answer, sequence_id=1)
    answer.write(drafter, "aaa")
    assert answer.drafted(drafter)
    assert not other.drafted(drafter)
    drafter.forget(answer)  # type: ignore[arg-type]
    drafter.forget(answer)  # type: ignore[arg-type]
    assert not answer.drafted(drafter)
