"""The checks can fail: each way to break the engine on purpose is caught by one check, written once.

A sabotage stands at a seam: a wrapped backend, device or drafter, another pool, prefix cache or policy. The check
compares with the oracle, looks at K/V, passes and books after every step, and counts replays, mismatches and rounds
that were worked out by hand.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest

from tests.support import sabotages as s
from tests.support.adversaries import VOCAB_SIZE
from tests.support.decoding import PROMPT, SAMPLED, Watched, letters, oracle
from tests.support.faulty_backends import AtPositions
from tests.support.late_backend import LateBackend
from tests.support.scale import thinned
from verispec.backends.cost import CostTable
from verispec.backends.protocol import PassKind
from verispec.engine import Request
from verispec.engine import engine as engine_module
from verispec.spec.drafter import Held
from verispec.spec.speculation import Speculation
from verispec.types import TokenEvent, TokenLogprobs, Totals

CHEAP = CostTable((1, 64), (1e-6, 1e-6), (0.0, 0.0))  # a stream may wait for any burst
PLAIN = replace(SAMPLED, logprobs=None, max_tokens=14)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """A sabotage may end requests with errors, which are logged."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@dataclass
class Sabotage:
    """What is put in place of the honest part, and what the check says of it."""

    says: str = ""
    watched: dict[str, Callable[[Any], Any]] = field(default_factory=dict)  # wrap, device, wrap_drafter
    parts: dict[str, type] = field(default_factory=dict)  # of the engine, by class name
    tells: Callable[[Watched], None] = lambda watched: None

    def made(self, window_len: int = 4, **options: Any) -> Watched:
        """An engine with the sabotage; its backend runs as late as it may."""
        wrap = self.watched.get("wrap", lambda backend: backend)
        watched_options = {**self.watched, "wrap": lambda backend: LateBackend(wrap(backend))}
        with pytest.MonkeyPatch.context() as patch:
            for name, part in self.parts.items():
                patch.setattr(engine_module, name, part)
            watched = Watched(window_len, **watched_options, **options)
        self.tells(watched)
        return watched


# The check.

Made = Callable[..., Watched]


def check(made: Made) -> list[Totals]:
    """Raise AssertionError unless the engine keeps its promise and its books; what the crowd counted."""
    check_counts(made)
    check_agreement(made)
    check_bursts(made)
    check_aborts(made)
    return check_a_crowd(made)


def check_counts(made: Made) -> None:
    """6 tokens with windows of 4: the k-th is wrong, or none; see `test_decode.py`."""
    expected = {1: (2, 1, 4, 7), 2: (2, 1, 3, 6), 3: (2, 1, 2, 5), 4: (1, 1, 1, 4), 99: (1, 0, 0, 4)}
    for k, wanted in expected.items():
        redraw = AtPositions({3 + k: 1}, vocab_size=VOCAB_SIZE)
        watched = made(4, agreeing=True, redraw=redraw, family=(8,))
        watched.ask(params=replace(SAMPLED, max_tokens=6))
        stats = watched.finish(100)[0].stats
        found = (stats.replays, stats.mismatches, stats.recomputed, stats.drafted)
        assert found == wanted, "counts of one mismatch"
    watched = made(8, agreeing=True, family=(2, 4))
    watched.ask((0, 1), replace(SAMPLED, max_tokens=40))
    stats = watched.finish(200)[0].stats
    assert stats.drafted == stats.accepted == stats.fast_passes, "nothing is drawn twice"


def check_agreement(made: Made) -> None:
    """Where fast passes give canonical bits nothing mismatches, whatever the sampling parameters."""
    watched = made(6, agreeing=True)
    for i in range(4):
        params = replace(
            SAMPLED, max_tokens=24, min_tokens=10 * (i % 2), stop_ids=(7,), seed=i, repetition_penalty=1.2 + i,
            presence_penalty=0.5, frequency_penalty=0.7,
        )  # fmt: skip
        watched.ask((0, 1, i), params, text=letters())
    outputs = watched.finish(300)
    assert watched.totals.replays > 5
    assert watched.totals.mismatches == 0, "fast passes agree, and yet a replay found another token"
    assert all(o.stats.drafted < len(o.token_ids) for o in outputs.values()), "tokens were decoded behind the end"


def check_bursts(made: Made) -> None:
    """Bursts of 5 end where their sequences end: at a stop id, or at the limit; each row gives one token."""
    tokens = oracle(Request(PROMPT, PLAIN))[0].token_ids
    for depth in (1, 2):
        for params in (PLAIN, replace(PLAIN, stop_ids=(tokens[7],)), replace(PLAIN, max_tokens=8, seed=3)):
            watched = made(4, cost=CHEAP, max_burst=5, depth=depth, prefix_cache=False)
            watched.ask(params=params, speculation=Speculation("none"))
            output = watched.finish(100)[0]
            num_rows = sum(watched.real_rows(PassKind.CANONICAL)) if depth == 1 else 0
            assert num_rows <= len(PROMPT) - 1 + len(output.token_ids), "rounds were run behind the end"


def check_aborts(made: Made) -> None:
    """Aborts between steps; then every slot is free, and the next request gets the oracle's bits."""
    for num_steps in (1, 3, 5):  # a prompt, a row of a window, a replay
        watched = made(4)
        aborted = watched.ask(params=replace(SAMPLED, max_tokens=20))
        for _ in range(num_steps):
            watched.step()
        watched.abort(aborted)
        watched.ask((2, 1), replace(SAMPLED, max_tokens=9))
        watched.finish(300)


def crowd() -> Iterator[Request]:
    """Requests that end in every way, share prefixes and sample in different ways."""
    long = Request(PROMPT, replace(SAMPLED, max_tokens=16), text=letters())
    tokens = oracle(long)[0].token_ids
    for i in range(3):
        penalties = {"repetition_penalty": 1.5, "presence_penalty": 0.6, "frequency_penalty": 0.5}
        yield replace(long, eos_ids=(tokens[5 + i],))
        yield replace(long, prompt_ids=(*PROMPT, i), params=replace(long.params, temperature=0.0, n=2))
        yield replace(long, params=replace(long.params, seed=i, **penalties))
        yield replace(long, params=replace(long.params, seed=i, min_tokens=4, stop_ids=(0, 3)))
        yield replace(long, text=letters("".join(chr(ord("a") + t) for t in tokens[4 + i : 6 + i])))
        yield replace(long, prompt_ids=(*PROMPT, 3, i), params=replace(long.params, seed=i, deterministic=False))
        yield replace(long, params=replace(PLAIN, seed=i), speculation=Speculation("none"))


def check_a_crowd(made: Made) -> list[Totals]:
    """Room for windows, then few slots, so that sequences are preempted; some are aborted; the cache grows warm."""
    totals = []
    for settings in ({"num_slots": 120, "apart": True}, {"num_slots": 44, "row_budget": 8, "cost": CHEAP}):
        watched = made(5, **settings)
        for i, request in enumerate([*crowd(), *crowd()]):
            request_id = watched.add(request)
            watched.step()
            if i % 7 == 6:
                watched.abort(request_id - 2)
        watched.finish(2000)
        totals.append(watched.totals)
    return totals


def test_the_unsabotaged_engine_passes_and_the_crowd_means_something() -> None:
    roomy, tight = check(Sabotage().made)
    assert roomy.mismatches > 17
    assert tight.preemptions > 20
    assert tight.replays > 20


# The sabotages.


def windows_are_streamed(watched: Watched) -> None:
    """Events tell of tokens that are not committed."""
    honest = watched.engine.step

    def step() -> list[TokenEvent]:
        events = honest()
        for sequence in watched.engine._roster.running:
            window = watched.decode.state(sequence)
            if isinstance(window, Held) and window.num_nodes:
                events.append(TokenEvent(sequence.request_id, 0, TokenLogprobs((0,), (0.0,))))
        return events

    watched.engine.step = step  # type: ignore[method-assign]


def device(says: str, kind: Callable[[Any], Any]) -> Sabotage:
    return Sabotage(says, {"device": kind})


def backend(says: str, kind: Callable[[Any], Any]) -> Sabotage:
    return Sabotage(says, {"wrap": kind})


def drafter(says: str, kind: Callable[[Any], Any]) -> Sabotage:
    return Sabotage(says, {"wrap_drafter": kind})


def part(says: str, name: str, kind: type) -> Sabotage:
    return Sabotage(says, parts={name: kind})


FAST, CANONICAL = PassKind.FAST, PassKind.CANONICAL
SABOTAGES: dict[str, Sabotage] = {
    "replays write nowhere": device("K/V that is not canonical|K/V is not", s.ReplaysWriteNowhere),
    "replays write to each other's slots": device("K/V", s.ReplaysWriteToEachOthersSlots),
    "fast K/V stays": device("K/V", s.FastKvStays),
    "replays run fast behind the engine's back": device("oracle|K/V", s.ReplaysRunFast),
    "replays are submitted as fast passes": backend("decoding is one row a step", s.ReplaysAreSubmittedFast),
    "everything runs fast": device("oracle|K/V", s.EverythingRunsFast),
    "canonical passes have any shape": backend("a canonical pass of 3 rows", s.AnyShape),
    "windows are committed unverified": device("oracle", partial(s.Confirming, which="all")),
    "one token too many is accepted": device("oracle", partial(s.Confirming, which="first wrong")),
    "the last position is not compared": device("oracle", partial(s.Confirming, which="last")),
    "the noise of drafted rows is off by one": device("oracle", partial(s.ShiftedNoise, kind=CANONICAL)),
    "the noise of fast rows is off by one": device("counts of one", partial(s.ShiftedNoise, kind=FAST)),
    "penalties ignore the path": device("oracle", partial(s.PenaltiesIgnoreThePath, kind=CANONICAL)),
    "penalties ignore the window": device("yet a replay", partial(s.PenaltiesIgnoreThePath, kind=FAST)),
    "a stale flight is committed": backend("oracle", s.StaleResults),
    "slots are looked up in a stale table": backend("own slot is the last", s.LateTables),
    "a burst runs on behind a stop": backend("behind the end", partial(s.Rebound, stop_ids=())),
    "a burst ends before its limit": backend("oracle", partial(s.Rebound, limit=-3)),
    "a row keeps another sample's noise": backend("oracle", partial(s.Rebound, next_seed=True)),
    "ready windows are forgotten": drafter("not finished", s.ForgetsReadyWindows),
    "windows are thrown away": drafter("counts of one", s.ReplaysNothing),
    "the last token of a window is not verified": drafter("counts of one", s.ReplaysTooLittle),
    "the rest survives a mismatch": drafter("counts of one", s.KeepsTheRest),
    "a stop in a window is overlooked": drafter("decoded behind the end", s.OverlooksStops),
    "leases are not trimmed": part("a lease between steps", "SlotPool", s.NeverTrims),
    "leases keep a slot too many": part("a lease between steps", "SlotPool", s.TrimsOneTooFew),
    "a slot of a trimmed lease is read": part("free slot|two owners|free", "SlotPool", s.TrimmedSlotsAreUsed),
    "a slot is lent twice": part("free slot|two owners|free", "SlotPool", s.LendsTwice),
    "what is rolled back stays held": part("slots|two owners, or none", "SlotPool", s.ForgetsRollbacks),
    "what is not canonical is published": part(
        "nobody committed|free or cached", "RadixPrefixCache", s.PublishesWhatIsNotCanonical
    ),
    "slots are published in a wrong order": part("K/V", "RadixPrefixCache", s.PublishesWrongSlots),
    "other tokens match": part("oracle|K/V|free", "RadixPrefixCache", s.MatchesOtherTokens),
    "a policy makes up shapes": part("a canonical pass of 3 rows", "Policy", s.ShapeOfTheRows),
    "uncommitted tokens are streamed": Sabotage("oracle", tells=windows_are_streamed),
}


@pytest.mark.parametrize("name", thinned(list(SABOTAGES)))
def test_every_sabotage_is_caught(name: str) -> None:
    sabotage = SABOTAGES[name]
    with pytest.raises((AssertionError, ValueError), match=sabotage.says):
        check(sabotage.made)


LIES = (s.OfAnotherLoad, s.OfRandomCosts, s.JoinsAlways, s.RoundsAtRandom, s.LargestShape)


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
def test_a_policy_that_lies_changes_no_output(lie: type) -> None:
    """An entry of another load, costs and rounds at random, shapes too large: only speed. See `a policy makes up
    shapes` for a lie that the same check finds."""
    made = Sabotage(parts={"Policy": lie}).made
    check_bursts(made)
    check_a_crowd(made)
