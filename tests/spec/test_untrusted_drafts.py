"""What a drafter says of probabilities and K/V is untrusted too: it changes no deterministic request and ends none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest

from tests.support.fake_backend import FakeBackend
from verispec.engine import Engine, Request
from verispec.errors import InputError
from verispec.spec.drafter import Drafter, Offer
from verispec.spec.none import NoDrafter
from verispec.spec.plan import SequencePlan
from verispec.types import (
    NO_PARENT,
    Accept,
    Draft,
    Proposal,
    SampleOutput,
    SamplingParams,
    SequenceView,
    Stored,
    Verdict,
)


class Handle:
    """A distribution that is certain of token 0."""

    def probabilities(self) -> list[list[float]]:
        return [[1.0] + [0.0] * 15]

    def release(self) -> None: ...


class Liar:
    """Drafts one token and adds something to the draft."""

    has_probabilities = True

    def __init__(self, **more: object) -> None:
        self._draft = replace(Draft.chain([0]), **more)  # type: ignore[arg-type]

    def offer(self, sequence: SequenceView, limit: int) -> Offer:
        return Offer(min(limit, 1), 1.0)

    def draft(self, plans: Sequence[SequencePlan]) -> list[Draft]:
        return [self._draft for _ in plans]

    def observe(self, plan: SequencePlan, draft: Draft, verdict: Verdict) -> None: ...

    def forget(self, sequence_id: int) -> None: ...


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
    assert run(Liar(), accept="match").token_ids == expected.token_ids
    assert Request([1], accept="recursive").accept is Accept.RECURSIVE  # type: ignore[arg-type]
    with pytest.raises(InputError, match="unknown accept 'perhaps'"):
        Request([1], accept="perhaps")  # type: ignore[arg-type]


ODD_OFFERS = {
    "floats": Offer(0.0, 0.0),  # type: ignore[arg-type]
    "an array": Offer(np.array([1, 2]), 0.5),  # type: ignore[arg-type]
    "NaN": Offer(3, math.nan),
    "no nodes, but other shapes": Offer(0, 0.0, alternatives=(Offer(2, 0.5),)),
    "nothing like an offer": "three",
}


@pytest.mark.parametrize("odd", ODD_OFFERS)
def test_an_odd_offer_drafts_nothing(odd: str) -> None:
    class Odd(Liar):
        def offer(self, sequence: SequenceView, limit: int) -> Offer:
            return ODD_OFFERS[odd]  # type: ignore[return-value]

    output = run(Odd())
    assert output.token_ids == run(NoDrafter()).token_ids
    assert output.stats.drafted == 0
    assert run(Liar()).stats.drafted > 0  # control


def test_offers_are_remembered_by_their_limit() -> None:
    """One and the same object, offered at every step, is cut to what is left."""

    class Same(Liar):
        limits: ClassVar[list[int]] = []
        always = Offer(300, 0.9)

        def offer(self, sequence: SequenceView, limit: int) -> Offer:
            self.limits.append(limit)
            return self.always

        def draft(self, plans: Sequence[SequencePlan]) -> list[Draft]:
            assert all(plan.draft_quota <= self.limits[-1] for plan in plans)
            return super().draft(plans)

    assert run(Same()).stats.drafted > 0
    assert len(set(Same.limits)) > 3
