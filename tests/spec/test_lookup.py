"""Drafts that the backend looks up: promised by what came true, offered where a backend does it, and in bursts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.fake_backend import FakeBackend
from verispec.backends.cost import CostTable
from verispec.backends.pass_builder import LOOK_UP
from verispec.backends.protocol import Pass, Ticket
from verispec.backends.rounds import looked_up
from verispec.config import EngineConfig
from verispec.engine import Engine, Request
from verispec.spec.drafter import Refusal
from verispec.spec.lookup import NO_LOOK_UP, LookupDrafter, found_behind
from verispec.spec.registry import DraftSetup, make_drafters
from verispec.spec.speculation import AUTO, Speculation
from verispec.spec.texts import characters
from verispec.spec.turn import Recipe
from verispec.types import SampleOutput, SamplingParams, Verdict

CHEAP_ROWS = CostTable((1, 64), (1e-4, 1.05e-4), (0.0, 0.0))
STEEP_ROWS = CostTable((1, 64), (1e-4, 64e-4), (0.0, 0.0))


def sequence(num_tokens: int = 50, **changes: Any) -> Any:
    values = {"sequence_id": 1, "token_ids": [0] * num_tokens, "computed_len": num_tokens - 1}
    values |= {"needs_host": False, "uses_probabilities": False, "params": SamplingParams(temperature=0.0)}
    values["prompt_len"] = num_tokens
    return SimpleNamespace(**values | changes)


def promised(drafter: LookupDrafter, seen: Any) -> list[float]:
    """The chances of the tokens of a chain."""
    (curve,) = drafter.curves(drafter.state(seen))
    assert curve.by_backend
    assert curve.cost is None
    return [level.tokens for level in curve.levels]


def after(drafter: LookupDrafter, seen: Any, counts: list[int], num_nodes: int = 8) -> None:
    """Rounds that accepted so many tokens; where none was, nothing had been found."""
    for count in counts:
        choice, draft = SimpleNamespace(num_nodes=num_nodes), [0] * (num_nodes if count else 0)
        verdict = Verdict(tuple(range(count)), 0)
        drafter.observe(SimpleNamespace(sequence=seen, choice=choice, draft=draft, verdict=verdict))


def test_what_came_true_is_promised() -> None:
    """Rounds that found nothing count; each sequence has its own rates, and begins with little hope."""
    drafter, quoting, telling = LookupDrafter(8), sequence(), sequence(sequence_id=2)
    fresh = promised(drafter, quoting)
    assert len(fresh) == 8
    assert 0.1 < fresh[0] < 0.2
    assert promised(drafter, telling) == fresh
    after(drafter, quoting, [8, 6, 8, 8, 7] * 4)
    after(drafter, telling, [0] * 20)
    assert promised(drafter, quoting)[7] > 0.3 > 0.1 > promised(drafter, telling)[0] > 0
    after(drafter, quoting, [1] * 20)  # the first token still comes true, and none behind it
    assert promised(drafter, quoting)[0] > 0.8
    assert promised(drafter, quoting)[2] < 0.3
    drafter.forget(quoting)
    after(drafter, quoting, [8])  # of a sequence that has ended
    assert promised(drafter, quoting) == fresh


def test_an_answer_is_believed_to_begin_like_the_last_ones() -> None:
    """Where nothing came true in them, less is promised; greedy and sampled ones apart; and never more than at first,
    because a few that quote would make all others try."""
    drafter, sampled = LookupDrafter(8), {"params": SamplingParams(temperature=1.0)}
    fresh = promised(drafter, sequence())
    for number in range(20):
        telling, quoting = sequence(sequence_id=2 * number, **sampled), sequence(sequence_id=2 * number + 1)
        for seen, counts in ((telling, [0] * 40), (quoting, [8] * 8)):
            drafter.state(seen)
            after(drafter, seen, counts)
            drafter.forget(seen)
    assert promised(drafter, sequence(sequence_id=100, **sampled))[0] < fresh[0] / 3
    assert promised(drafter, sequence(sequence_id=101)) == fresh
    for number in range(40):
        seen = sequence(sequence_id=200 + number, **sampled)
        drafter.state(seen)
        after(drafter, seen, [0, 3] * 8)
        drafter.forget(seen)
    assert promised(drafter, sequence(sequence_id=300, **sampled)) == pytest.approx(fresh, rel=0.35)


def test_what_is_seldom_found_is_seldom_drafted() -> None:
    """The share of rounds that have rows for it: by rounds that looked up, and by answers that were read."""
    drafter, looking, reading = LookupDrafter(8), sequence(), sequence(len(PROMPT), sequence_id=2, token_ids=PROMPT)

    def share(seen: Any) -> float:
        (curve,) = drafter.curves(drafter.state(seen))
        return float(curve.levels[0].share)

    fresh = share(looking)
    assert fresh == share(reading) < 0.5
    after(drafter, looking, [0] * 20)
    reading.token_ids = PROMPT + list(range(200, 230))  # of which nothing stood before
    reading.computed_len = len(reading.token_ids) - 1
    assert share(looking) < fresh / 2
    assert share(reading) < fresh / 2
    after(drafter, looking, [3] * 20)
    assert share(looking) > 0.8


PROMPT = list(range(100, 160))


def promised_behind(*answer: int) -> float:
    """Of the first token, when this answer was written in plain rounds and read four tokens at a time."""
    drafter, found = LookupDrafter(8), 0.0
    for length in range(0, len(answer) + 1, 4):
        tokens = PROMPT + list(answer[:length])
        found = promised(drafter, sequence(len(tokens), token_ids=tokens))[0]
    return found


def test_an_answer_tells_what_was_never_drafted() -> None:
    """Who begins to quote is promised drafts without having had any; who stops, or never did, is not."""
    quoted, told = PROMPT[10:34], range(200, 224)
    fresh = promised_behind()
    assert promised_behind(*quoted) > 0.5 > 0.2 > fresh > promised_behind(*told) > 0
    assert promised_behind(*told, *quoted) > 0.4
    assert promised_behind(*quoted, *told) < 0.1


def test_an_answer_that_has_begun_before_anybody_looked_is_read() -> None:
    """Its drafters may be asked late, when many begin at once."""
    drafter, tokens = LookupDrafter(8), PROMPT + PROMPT[10:22]
    fresh = promised(LookupDrafter(8), sequence(len(PROMPT), token_ids=PROMPT))[0]
    late = sequence(len(tokens), token_ids=tokens, prompt_len=len(PROMPT))
    assert promised(drafter, late)[0] > 0.4 > 0.2 > fresh


def test_answers_that_tell_nothing_are_not_learned_from() -> None:
    """Ended before anything was drawn, or without a first token that came true."""
    drafter, fresh = LookupDrafter(8), promised(LookupDrafter(8), sequence())
    for number in range(2000):
        seen = sequence(sequence_id=number)
        drafter.state(seen)
        drafter.forget(seen)
    missed = sequence(sequence_id=5000)
    drafter.state(missed)
    after(drafter, missed, [1])  # one first token is right, and the one behind it is not
    drafter.forget(missed)
    later = [b / a for found in (fresh, promised(drafter, sequence(sequence_id=5001))) for a, b in [found[:2]]]
    assert later[1] == pytest.approx(later[0], abs=0.05)


def test_rounds_that_were_observed_are_not_read_again() -> None:
    drafter, tokens = LookupDrafter(8), PROMPT + PROMPT[10:34]
    promised(drafter, sequence(len(PROMPT), token_ids=PROMPT))
    after(drafter, sequence(len(tokens), token_ids=tokens), [0] * 20)
    assert promised(drafter, sequence(len(tokens), token_ids=tokens))[0] < 0.1


@pytest.mark.parametrize("seed", range(20))
def test_an_answer_is_read_as_a_backend_looks_up(seed: int) -> None:
    tokens = np.random.default_rng(seed).integers(0, 4, 60)
    text = characters(tokens.tolist())
    for end in range(1, 60):
        assert characters(looked_up(tokens[:end], 8).tolist()) == found_behind(text, end)[:8]


def test_who_cannot_be_looked_up_for_is_told_why() -> None:
    drafter = LookupDrafter(8)
    needs = {"needs_host": True}, {"uses_probabilities": True}
    for changes, says in (*((need, "the host") for need in needs), ({"computed_len": 3}, "not computed")):
        state = drafter.state(sequence(**changes))
        assert isinstance(state, Refusal)
        assert says in state
    backend = FakeBackend(looks_up=False)
    for setup in (DraftSetup(), DraftSetup(backend=backend)):
        assert make_drafters(setup)["lookup"].state(sequence()) == Refusal(NO_LOOK_UP)


def test_chains_are_recipes() -> None:
    drafter, choice = LookupDrafter(8), SimpleNamespace(num_nodes=5)
    turns: list[Any] = [SimpleNamespace(choice=choice, is_resident=is_resident) for is_resident in (True, False)]
    chain, nothing = drafter.draft(turns)
    assert chain == Recipe(5, LOOK_UP)
    assert len(nothing) == 0


class Counting(FakeBackend):
    """Keeps what was submitted. The next token is mostly the same one's: texts repeat themselves."""

    def __init__(self, *, looks_up: bool) -> None:
        super().__init__(looks_up=looks_up)
        self.markov *= 4
        self.submitted: list[Pass] = []

    def submit(self, pass_: Pass) -> Ticket:
        self.submitted.append(pass_)
        return super().submit(pass_)


def finished(method: str, *, looks_up: bool, cost: CostTable = CHEAP_ROWS) -> tuple[SampleOutput, Counting]:
    backend = Counting(looks_up=looks_up)
    engine = Engine(
        backend, family=(1, 16, 64), drafters=make_drafters(DraftSetup(backend=backend)), cost=cost,
        config=EngineConfig(num_slots=256, max_len=120),
    )  # fmt: skip
    engine.add(Request([1, 2, 3], SamplingParams(max_tokens=90), Speculation(method), is_streamed=False))
    events = [event for _ in iter(lambda: engine.has_work, False) for event in engine.step()]
    (output,) = [event.output for event in events if event.output is not None]
    assert not getattr(engine._drafters._drafters["lookup"], "_seen", {})
    return output, backend


def test_bursts_look_up_and_change_no_token() -> None:
    plain, _ = finished("none", looks_up=True)
    output, backend = finished("lookup", looks_up=True)
    assert (output.token_ids, output.logprobs) == (plain.token_ids, plain.logprobs)
    stats = output.stats
    assert stats.drafted >= stats.accepted > 30
    assert stats.draft_passes == 0
    assert stats.passes < 60
    assert len(backend.submitted) < 10
    without, _ = finished("lookup", looks_up=False)
    assert (without.token_ids, without.stats.drafted) == (plain.token_ids, 0)
    assert without.stats.no_draft_reason == NO_LOOK_UP


def test_auto_looks_up_where_the_backend_does() -> None:
    """And only where rows cost little."""
    plain, _ = finished("none", looks_up=True)
    for looks_up, cost in ((True, CHEAP_ROWS), (True, STEEP_ROWS), (False, CHEAP_ROWS)):
        output, _ = finished(AUTO, looks_up=looks_up, cost=cost)
        assert output.token_ids == plain.token_ids
        assert (output.stats.chosen.get("lookup", 0) > 0) is (looks_up and cost is CHEAP_ROWS)
