"""What a drafter says of probabilities and K/V is untrusted too: it changes no deterministic request and ends none."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest

from tests.support.drafters import Eager
from tests.support.fake_backend import FakeBackend
from verispec.engine import Engine, Request
from verispec.errors import InputError
from verispec.spec.drafter import Curve, Drafter, DrafterSet, Level
from verispec.spec.none import NoDrafter
from verispec.spec.speculation import Speculation
from verispec.spec.turn import SequenceView, Turn
from verispec.types import (
    NO_PARENT,
    Accept,
    Draft,
    Proposal,
    SampleOutput,
    SamplingParams,
    Stored,
)


class Handle:
    """A distribution that is certain of token 0."""

    def probabilities(self) -> list[list[float]]:
        return [[1.0] + [0.0] * 15]

    def release(self) -> None: ...


class Liar(Eager):
    """Drafts one token and adds something to the draft."""

    has_probabilities = True
    most_nodes = 1

    def __init__(self, **more: object) -> None:
        self._draft = replace(Draft.chain([0]), **more)  # type: ignore[arg-type]

    def guess(self, sequence: SequenceView, num_nodes: int) -> Draft:
        return self._draft


def run(drafter: Drafter, **request: object) -> SampleOutput:
    engine = Engine(FakeBackend(), family=(4, 8, 16), drafters={"it": drafter})
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=5)
    engine.add(Request([1, 2, 3], params, **request))  # type: ignore[arg-type]
    outputs = []
    while engine.has_work:
        outputs += [e.output for e in engine.step() if e.output is not None]
        engine.check()
    (output,) = outputs
    return output


LIES = {
    "a proposal": {"proposals": (Proposal(NO_PARENT, Handle(), 0),)},
    "a proposal of no node": {"proposals": (Proposal(9, Handle(), 0),)},
    "a negative row": {"proposals": (Proposal(NO_PARENT, Handle(), -1),)},
    "a store that is not there": {"stored": Stored(5, 1)},
    "the target's own store": {"stored": Stored(0, 1)},
    "more tokens than there are": {"stored": Stored(1, 99)},
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_changes_nothing(lie: str) -> None:
    expected = run(NoDrafter())
    found = run(Liar(**LIES[lie]))
    assert (found.token_ids, found.logprobs, found.error) == (expected.token_ids, expected.logprobs, None)


def test_a_rule_may_be_given_by_its_name() -> None:
    expected = run(NoDrafter())
    assert run(Liar(), speculation=Speculation.of("it", accept="match")).token_ids == expected.token_ids
    assert Speculation.of("it", accept="recursive").accept is Accept.RECURSIVE
    with pytest.raises(InputError, match="unknown accept 'perhaps'"):
        Speculation.of("it", accept="perhaps")


ODD_CURVES = {
    "no nodes": (Curve((Level(0, 0.5),)),),
    "half a node": (Curve((Level(0.5, 0.5),)),),  # type: ignore[arg-type]
    "an array": (Curve((Level(np.array([1, 2]), 0.5),)),),  # type: ignore[arg-type]
    "NaN": (Curve((Level(3, math.nan),)),),
    "nothing": (),
    "nothing like a curve": "three",
}


@pytest.mark.parametrize("odd", ODD_CURVES)
def test_an_odd_curve_drafts_nothing(odd: str) -> None:
    class Odd(Liar):
        def curves(self, key: Hashable) -> tuple[Curve, ...]:
            return ODD_CURVES[odd]  # type: ignore[return-value]

    output = run(Odd())
    assert output.token_ids == run(NoDrafter()).token_ids
    assert output.stats.drafted == 0
    assert run(Liar()).stats.drafted > 0  # control


@pytest.mark.parametrize("levels", [((2, 0.5, 1.0),), iter([(2, 0.5, 1.0)]), [Level(2, 0.5)]])
def test_levels_of_another_type_are_levels(levels: object) -> None:
    class Plain(Liar):
        def curves(self, key: Hashable) -> tuple[Curve, ...]:
            return (Curve(levels),)  # type: ignore[arg-type]

    (curve,) = DrafterSet({"it": Plain()}, vocab_size=10, max_tail=4).curves("it", None)
    assert curve.levels == (Level(2, 0.5),)
    assert type(curve.levels[0]) is Level


def test_a_draft_is_cut_to_what_is_left() -> None:
    """A curve knows nothing of the request's length; what is granted does."""

    class Long(Liar):
        most_nodes = 300
        granted: ClassVar[list[int]] = []

        def draft(self, turns: Sequence[Turn]) -> list[Draft]:
            for turn in turns:
                left = 3 + 12 - len(turn.sequence.token_ids) - 1
                assert turn.choice.num_nodes <= left
                self.granted.append(turn.choice.num_nodes)
            return super().draft(turns)

    assert run(Long()).stats.drafted > 0
    assert len(set(Long.granted)) > 3
