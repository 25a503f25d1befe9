"""What the policy chooses at made-up costs, and that `auto` does what it chose. It decides speed, never bits."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import pytest

from tests.support.adversaries import VOCAB_SIZE, Adversary, alone, collect, facts, keep_apart
from tests.support.decoding import SAMPLED, STEEP_COST, Watched
from tests.support.drafters import Eager
from tests.support.fake_backend import FakeBackend
from tests.support.faulty_backends import AtRate, WrappedBackend
from tests.support.skipping import menu_of
from verispec.backends.cost import FLAT_COST, CostTable
from verispec.backends.protocol import Pass, PassKind, Ticket, View
from verispec.config import EngineConfig
from verispec.engine import Engine, Request
from verispec.engine import policy as policy_module
from verispec.engine.policy import NO_FASTER, STAYS_PLAIN, Policy
from verispec.spec.decode import DecodeConfig
from verispec.spec.drafter import Curve, Drafter, DrafterSet, Held, Level, Refusal
from verispec.spec.none import NoDrafter
from verispec.spec.registry import DraftSetup, make_drafters
from verispec.spec.speculation import AUTO, Speculation
from verispec.spec.tree import MAX_NODES, TreeShape
from verispec.spec.turn import Choice, Turn
from verispec.types import Draft, SamplingParams, Verdict

CHEAP = CostTable((1, 64), (0.05, 0.05), (0.0, 0.0))
WORTH_IT = 1.05  # drafts that cost passes of their own have to promise that much


def cost(**seconds: float) -> CostTable:
    """Seconds of a pass by its rows, `m8=1.5`; contexts cost nothing."""
    shapes = tuple(int(name[1:]) for name in seconds)
    return CostTable(shapes, tuple(seconds.values()), (0.0,) * len(shapes))


class Promising(Eager):
    """Promises these curves to everybody, or to nobody; counts how often it is asked for them."""

    def __init__(self, *curves: Curve, state: Hashable | Refusal | Held = "any") -> None:
        self._curves = curves
        self._state = state
        self.num_asked = 0

    def state(self, sequence: object) -> Hashable | Refusal | Held:
        return self._state

    def curves(self, key: Hashable) -> tuple[Curve, ...]:
        self.num_asked += 1
        return self._curves


class Windows(Promising):
    """Windows under way, by sequence."""

    def __init__(self, windows: Sequence[Held]) -> None:
        super().__init__(Curve.chain(32, 0.999, by_fast_rounds=True))
        self._windows = windows

    def state(self, sequence: object) -> Held:
        return self._windows[sequence.sequence_id]  # type: ignore[attr-defined]


@dataclass
class Asking:
    """A sequence, as far as the policy and drafters look at it."""

    sequence_id: int
    speculation: Speculation
    token_ids: tuple[int, ...] = (1, 2, 3)
    computed_len: int = 2
    prompt_len: int = 10
    params: SamplingParams = SAMPLED
    constraint: None = None
    needs_host: bool = False
    uses_probabilities: bool = False
    draws_plainly: bool = True
    is_followed: bool = False


def turn(sequence_id: int, method: str, *, room: int = 100, **speculation: object) -> Turn:
    asking = Asking(sequence_id, Speculation(method, **speculation))  # type: ignore[arg-type]
    return Turn(asking, 0, 1, True, 10, 1, True, [], 0, (), room)  # type: ignore[arg-type]


def policy(
    drafters: Mapping[str, Drafter] | Drafter,
    family: Sequence[int],
    costs: CostTable = FLAT_COST,
    *,
    row_budget: int | None = None,
    max_draft: int | None = None,
    fits_rows: bool = False,
) -> Policy:
    known = drafters if isinstance(drafters, Mapping) else {"it": drafters}
    budget = row_budget or max((*family, costs.shapes[-1] if not family else 1))
    found = DrafterSet(known, vocab_size=VOCAB_SIZE, max_tail=64)
    return Policy(
        family, costs, found, row_budget=budget, max_draft=max_draft, max_burst=16, fits_rows=fits_rows
    )  # fmt: skip


def choose(
    policy: Policy, methods: Sequence[str], *, others: int = 0, beside: int = 0, canonical: bool = True, room: int = 100
) -> list[Choice]:
    """`others` are rows of prompts that run in the same pass: they give no token yet."""
    turns = [turn(i, method, room=room) for i, method in enumerate(methods)]
    policy.choose(turns, is_canonical=canonical, other_rows=others, other_tokens=0, beside=beside)
    return [t.choice for t in turns]


def nodes(
    drafter: Drafter, family: Sequence[int], costs: CostTable = FLAT_COST, *, count: int = 1, **load: object
) -> tuple[int, ...]:
    """The nodes of each of so many sequences that draft so."""
    options = {name: load.pop(name) for name in ("row_budget", "max_draft", "fits_rows") if name in load}
    found = choose(policy(drafter, family, costs, **options), ["it"] * count, **load)  # type: ignore[arg-type]
    return tuple(choice.num_nodes for choice in found)


def tree(*levels: tuple[int, float], passes: CostTable | None = None, forced: bool = False) -> Promising:
    """A drafter that promises levels (nodes, expected tokens)."""
    return Promising(Curve(tuple(Level(*x) for x in levels), cost=passes, what="it", is_forced=forced))


def test_levels_that_are_seldom_drafted_cost_as_seldom() -> None:
    """A pass is for all that draft: with many sequences somebody nearly always wants it. The control are levels that
    are always drafted."""
    passes, costs = cost(m1=0.5, m64=0.5), cost(m1=1.0, m64=1.0)
    seldom, always = (
        Promising(Curve((Level(1, 0.9), Level(1, 0.3, share), Level(1, 0.1, share**2)), cost=passes))
        for share in (0.3, 1.0)
    )
    assert nodes(seldom, (1, 64), costs) == (3,)
    assert nodes(always, (1, 64), costs) == (1,)
    assert set(nodes(seldom, (1, 64), costs, count=16)) == {1}


def test_rows_that_are_seldom_drafted_cost_as_seldom_where_passes_fit_them() -> None:
    """As by a look-up that finds little: a row there takes half a pass. Elsewhere a pass has all rows that might be."""
    seldom, always = (
        Promising(Curve((Level(1, 0.2, share), Level(1, 0.15, share)), by_backend=True)) for share in (0.25, 1.0)
    )
    for count in (1, 4):
        family = (1, 2, 3) if count == 1 else (4, 8, 12)
        costs = CostTable(family, (1.0, 1.5, 2.0), (0.0,) * 3)
        assert set(nodes(seldom, family, costs, count=count, fits_rows=True)) == {2}
        assert set(nodes(seldom, family, costs, count=count)) == {0}
        assert set(nodes(always, family, costs, count=count, fits_rows=True)) == {0}


@pytest.mark.parametrize(
    ("leaves_out", "draws_plainly", "by_backend", "expected"),
    [(True, True, True, 3), (False, True, True, 1), (True, False, True, 1), (False, False, False, 3)],
)
def test_passes_that_nobody_wants_cost_all_of_it_where_they_are_not_left_out(
    leaves_out: bool, draws_plainly: bool, by_backend: bool, expected: int
) -> None:
    """On a far device, where they are sent before that is known; the host sends none in vain. One sequence that does
    not draw plainly is enough."""
    passes, costs = cost(m1=0.2, m64=0.2), replace(cost(m1=1.0, m64=1.0), trip=1e-3)
    levels = (Level(1, 0.9), Level(1, 0.3, 0.3), Level(1, 0.1, 0.09))
    drafters = DrafterSet(
        {"it": Promising(Curve(levels, cost=passes, by_backend=by_backend))}, vocab_size=VOCAB_SIZE, max_tail=64
    )
    chosen = Policy((1, 64), costs, drafters, row_budget=64, max_draft=None, max_burst=16, leaves_out=leaves_out)
    chosen.rates.host_seconds = 0.0
    first, other = turn(0, "it"), turn(1, "none")
    other.states = (("it", Refusal("nothing")),)
    other.sequence.draws_plainly = draws_plainly  # type: ignore[misc]
    chosen.choose([first, other], is_canonical=True, other_rows=0, other_tokens=0, beside=0)
    assert first.choice.num_nodes == expected


# A batch ends with its last sequence.


def drafting(rooms: Sequence[int], *, others: int | None, forced: bool = False, plain: int = 0) -> list[int]:
    """The sequences that draft, of those that have so much left; the last `plain` of them have no drafter."""
    chosen = policy({"it": tree((1, 0.9), forced=forced), "none": NoDrafter()}, (1, 64), cost(m1=1.0, m64=1.1))
    turns = [turn(i, "it" if i < len(rooms) - plain else "none", room=room) for i, room in enumerate(rooms)]
    more = {"other_rows": others is not None, "other_tokens": others is not None}
    chosen.choose(turns, is_canonical=True, **more, beside=0, room_of_others=others)
    return [i for i, t in enumerate(turns) if t.choice.num_nodes]


def test_where_a_batch_would_end_no_earlier_nobody_drafts() -> None:
    """Unless it is not known to be one, all draft, or it is the last ones that do."""
    assert drafting([50, 50, 50], others=None) == [0, 1, 2]
    assert drafting([50, 50, 50], others=-1) == [0, 1, 2]
    assert drafting([50, 50, 50], others=50) == []
    assert drafting([50, 50, 50], others=49) == [0, 1, 2]
    assert drafting([60, 50, 40], others=45) == [0, 1]
    assert drafting([60, 50, 55], others=-1, plain=1) == [0]
    assert drafting([50, 50], others=90, forced=True) == [0, 1]


@pytest.mark.parametrize("fits_rows", [False, True])
@pytest.mark.parametrize("needs_host", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_a_batch_of_equals_drafts_what_they_would_draft_otherwise(seed: int, needs_host: bool, fits_rows: bool) -> None:
    """The last one ends sooner exactly if all of them are quicker, whatever their promise and what it takes."""
    rng = random.Random(seed)
    levels = [Level(1, rng.uniform(0.02, 0.9), rng.uniform(0.2, 1.0)) for _ in range(rng.randint(1, 4))]
    passes = rng.choice([None, cost(m1=rng.uniform(0.05, 0.4), m64=0.5)])
    drafter = Promising(Curve(tuple(levels), cost=passes, by_backend=rng.random() < 0.5))
    costs = replace(cost(m1=1.0, m8=1.2, m64=rng.uniform(1.3, 3.0)), trip=rng.choice([0.0, 0.1]))
    found = []
    for others in (None, -1):
        turns = [turn(i, "it", room=100) for i in range(8)]
        for each in turns:
            each.sequence.needs_host = needs_host  # type: ignore[misc]
        chosen = policy(drafter, (1, 8, 64), costs, fits_rows=fits_rows)
        chosen.choose(turns, is_canonical=True, other_rows=0, other_tokens=0, beside=0, room_of_others=others)
        found.append([t.choice.num_nodes for t in turns])
    assert found[0] == found[1]


def test_who_drafts_much_does_not_keep_a_batch_waiting_for_who_drafts_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both would draft by themselves: one gains by it, the other ends later. Unless it has less left anyway."""

    def who_drafts(room: int, *, is_joint: bool = True) -> list[str]:
        drafters = {"much": tree((1, 0.95), passes=cost(m1=0.3, m64=0.3)), "little": tree((1, 0.05))}
        turns = [turn(0, "much", room=100), turn(1, "little", room=room)]
        policy(drafters, (1, 64), cost(m1=1.0, m64=1.0)).choose(
            turns, is_canonical=True, other_rows=0, other_tokens=0, beside=0, room_of_others=-1 if is_joint else None
        )
        return [t.choice.drafter for t in turns]

    assert who_drafts(100, is_joint=False) == ["much", "little"]
    assert who_drafts(100) == ["", ""]
    assert who_drafts(60) == ["much", "little"]
    monkeypatch.setattr(policy_module, "_ends_sooner", lambda *_: True)
    assert who_drafts(100) == ["much", "little"]


@pytest.mark.parametrize(("acceptance", "room", "begins"), [(0.02, 100, False), (0.5, 100, True), (0.5, 4, False)])
def test_drafts_begin_only_where_they_save_more_than_beginning_takes(
    acceptance: float, room: int, begins: bool
) -> None:
    """Whoever gets up waits for what is in the air; who is up already drafts."""
    for last, expected in (({}, True), ("stays", begins)):
        turns = [turn(i, "it", room=room) for i in range(4)]
        drafter = Promising(Curve((Level(1, acceptance),), by_backend=True))
        chosen = policy(drafter, (1, 64), replace(cost(m1=1.0, m64=1.0), trip=1.0))
        stays = dict.fromkeys(turns, STAYS_PLAIN) if last else {}
        chosen.choose(turns, is_canonical=True, other_rows=0, other_tokens=0, beside=0, last=stays)
        assert {bool(t.choice.num_nodes) for t in turns} == {expected}
        assert expected or {t.choice.reason for t in turns} == {STAYS_PLAIN.reason}


def test_of_a_batch_rows_go_to_who_ends_last() -> None:
    """Where they are too few for all; without a batch to the oldest."""
    for others, expected in ((-1, [10]), (None, [0, 1, 2, 3, 4, 5])):
        chosen = policy(tree(*[(1, 0.9)] * 4), (1, 64), cost(m1=1.0, m64=1.1), row_budget=35)
        turns = [turn(i, "it", room=1000 if i == 10 else 10) for i in range(11)]
        chosen.choose(turns, is_canonical=True, other_rows=0, other_tokens=0, beside=0, room_of_others=others)
        assert [i for i, t in enumerate(turns) if t.choice.num_nodes] == expected


class Zeros(Eager):
    def guess(self, sequence: object, num_nodes: int) -> Draft:
        return Draft.chain([0] * num_nodes)


@pytest.mark.parametrize(
    ("is_streamed", "batches", "drafts"),
    [(False, (1, 1), False), (False, (1, 2), True), (False, (0, 0), True), (True, (1, 1), True)],
    ids=["one caller", "two batches", "two callers", "streams"],
)
def test_of_a_batch_only_the_last_draft(is_streamed: bool, batches: tuple[int, int], drafts: bool) -> None:
    """By the engine: beside one that cannot draft and has more left, others draft only if somebody sees their tokens,
    or waits for them alone."""
    backend = FakeBackend()
    drafters = {"it": Zeros(), "none": NoDrafter()}
    engine = Engine(backend, family=(1, 16, 64), drafters=drafters, cost=CHEAP, config=EngineConfig(num_slots=256))
    for method, max_tokens, batch in (("it", 30, batches[0]), ("none", 40, batches[1])):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        engine.add(Request([1, 2, 3], params, Speculation(method), is_streamed=is_streamed, batch=batch))
    events = [event for _ in iter(lambda: engine.has_work, False) for event in engine.step()]
    drafted = {event.request_id: event.output.stats.drafted for event in events if event.output is not None}
    assert (drafted[0] > 0) is drafts
    assert drafted[1] == 0


# What the host costs.


def test_what_needs_the_host_anyway_loses_nothing_by_a_draft_of_the_host() -> None:
    """And gains nothing by the backend's: the host has to draft it, with a trip for every level."""
    costs = replace(cost(m1=1.0, m64=1.0), trip=0.5)
    for by_backend, curve_cost in ((False, None), (True, cost(m1=0.2, m64=0.2))):
        one = Promising(Curve((Level(1, 0.4),), cost=curve_cost, by_backend=by_backend))
        found = {}
        for needs_host in (False, True):
            chosen = policy(one, (1, 64), costs)
            chosen.rates.host_seconds = 0.6
            asked = turn(0, "it")
            asked.sequence.needs_host = needs_host  # type: ignore[misc]
            chosen.choose([asked], is_canonical=True, other_rows=0, other_tokens=0, beside=0)
            found[needs_host] = asked.choice
        assert (found[False].num_nodes, found[True].num_nodes) == ((1, 0) if by_backend else (0, 1))
        assert found[False].by_backend is by_backend


def test_choices_follow_the_hosts_time_for_rounds_that_the_backend_drafts() -> None:
    """However slowly it moves, and where the first reading was far off."""
    one = Promising(Curve((Level(1, 0.5),), cost=cost(m1=0.1, m64=0.1), by_backend=True))
    drifting = policy(one, (1, 64), cost(m1=1.0, m64=1.0))
    assert choose(drifting, ["it"])[0].num_nodes == 1
    for i in range(60):
        drifting.rates.note_rounds(0.01 * 1.1**i)
        choose(drifting, ["it"])
    assert choose(drifting, ["it"])[0].num_nodes == 0
    for _ in range(60):
        drifting.rates.note_rounds(0.001)
        choose(drifting, ["it"])
    assert choose(drifting, ["it"])[0].num_nodes == 1


def test_what_the_host_takes_for_rounds_in_the_air_is_hidden_behind_them() -> None:
    """Where it is far: a round takes as long as the device or the host, whoever takes longer. Where it is near, both
    take their time one after the other, and longer drafts pay for it."""
    curve = Curve((Level(1, 0.9), Level(1, 0.35)), cost=cost(m1=0.4, m64=0.4), by_backend=True)
    found = {}
    for trip in (0.0, 0.1):
        for seconds in (0.0, 1.0, 20.0):
            chosen = policy(Promising(curve), (1, 64), replace(cost(m1=1.0, m64=1.0), trip=trip))
            chosen.rates.note_rounds(seconds)
            found[trip, seconds] = choose(chosen, ["it"])[0].num_nodes
    assert (found[0.1, 0.0], found[0.1, 1.0], found[0.1, 20.0]) == (1, 1, 0)
    assert (found[0.0, 0.0], found[0.0, 1.0]) == (1, 0)


# What is drafted already.

WIDE, LONG = TreeShape.parse("branch:4"), TreeShape.parse("chain:4")


def after(promised: tuple[float, float], last: TreeShape, *, room: int, trip: float) -> TreeShape | None:
    """The shape that is drafted when the wide and the long one promise so many tokens, and the last one was drafted."""
    curves = (Curve((Level(4, promised[0]),), WIDE), Curve((*[Level(1, promised[1] / 4)] * 4,), LONG))
    chosen = policy(Promising(*curves), (1, 64), replace(cost(m1=1.0, m64=1.0), trip=trip))
    asked = turn(0, "it", room=room)
    asked.sequence.prompt_len = 3  # type: ignore[attr-defined]
    chosen.choose(
        [asked], is_canonical=True, other_rows=0, other_tokens=0, beside=0, last={asked: Choice("it", 4, last)}
    )
    return asked.choice.shape


def test_another_draft_is_chosen_where_it_saves_more_than_the_change_takes() -> None:
    """The last rounds have to land first. Control: where that takes no time, the better one is drafted at once."""
    better, much_better = (0.90, 0.91), (0.30, 0.91)
    assert after(better, WIDE, room=100, trip=1.0) == WIDE
    assert after(better, WIDE, room=100, trip=1e-6) == LONG
    assert after(much_better, WIDE, room=100, trip=1.0) == LONG
    assert after(much_better, LONG, room=100, trip=1.0) == LONG
    assert after(much_better, WIDE, room=1, trip=1.0) == WIDE, "the answer ends before it has paid"


def test_a_draft_that_was_cut_at_the_end_of_an_answer_is_kept() -> None:
    chosen = policy(Promising(Curve((Level(1, 0.9), Level(3, 0.8)), WIDE)), (1, 64), cost(m1=1.0, m64=1.0))
    asked = turn(0, "it", room=2)
    asked.sequence.prompt_len = 3  # type: ignore[attr-defined]
    last = Choice("it", 2, WIDE)
    chosen.choose([asked], is_canonical=True, other_rows=0, other_tokens=0, beside=0, last={asked: last})
    assert asked.choice == last


# Windows, where replays are cheaper.

WINDOW = Curve.chain(32, 0.999, by_fast_rounds=True)
NOTHING = Promising(state=Refusal("nothing to draft"))


def by_decoding(
    family: Sequence[int],
    costs: CostTable,
    *,
    window: Curve = WINDOW,
    others: int = 0,
    count: int = 1,
    drafts: Drafter = NOTHING,
) -> bool:
    drafters = {"drafts": drafts, "decode": Promising(window)}
    return choose(policy(drafters, family, costs), [AUTO] * count, others=others)[0].grows


def test_where_small_canonical_passes_are_cheap_nobody_decodes_regularly() -> None:
    assert not by_decoding((1, 2, 4, 8), FLAT_COST)
    assert not by_decoding((1, 2, 4, 8, 16, 64), STEEP_COST, count=3)


@pytest.mark.parametrize("needs_host", [False, True])
def test_where_every_round_needs_the_host_windows_may_pay_though_no_pass_is_shorter(needs_host: bool) -> None:
    """They need it once for all of their tokens."""
    chosen = policy({"drafts": NOTHING, "decode": Promising(WINDOW)}, (1, 2, 4, 8, 16, 64), FLAT_COST)
    chosen.rates.host_seconds = 2.0
    asked = turn(0, AUTO)
    asked.sequence.needs_host = needs_host  # type: ignore[misc]
    chosen.choose([asked], is_canonical=True, other_rows=0, other_tokens=0, beside=0)
    assert asked.choice.grows is needs_host
    assert (asked.choice.because == NO_FASTER) is not needs_host


def test_where_only_a_large_shape_is_canonical_windows_are_decoded() -> None:
    """One row in a pass of 64 costs 64 s a token; in a window it costs 1 s, and 1/33 of a replay of 64 s."""
    drafters = {"drafts": NOTHING, "decode": Promising(Curve.chain(32, 1.0, by_fast_rounds=True))}
    (choice,) = choose(policy(drafters, (64,), STEEP_COST), [AUTO])
    assert (choice.drafter, choice.num_nodes, choice.grows) == ("decode", 32, True)
    # 33 tokens in 32 + 64 s.
    assert choice.because == "canonical passes predicted 0.0156 tokens a second, replays 0.344"


def test_a_crowd_that_fills_the_shape_decodes_canonically() -> None:
    found = [by_decoding((64,), STEEP_COST, count=n) for n in (1, 8, 16, 48, 64)]
    assert found == [True] * 3 + [False] * 2


@pytest.mark.parametrize(("acceptance", "expected"), [(1.0, True), (0.9, True), (0.5, True), (0.01, False)])
def test_windows_that_are_rarely_confirmed_are_not_decoded(acceptance: float, expected: bool) -> None:
    """Of 32 tokens that cost 96 s together a replay confirms 1 + a + a^2 + ...; a plain pass of 64 rows gives one."""
    assert by_decoding((64,), STEEP_COST, window=Curve.chain(32, acceptance, by_fast_rounds=True)) is expected


def test_good_drafts_beat_windows() -> None:
    assert by_decoding((64,), STEEP_COST, drafts=Promising(Curve.chain(8, 0.9)))
    assert not by_decoding((64,), STEEP_COST, drafts=Promising(Curve.chain(60, 0.99)))


def test_beside_canonical_rows_that_run_anyway_a_row_more_is_free() -> None:
    assert by_decoding((64,), STEEP_COST, others=0)
    assert not by_decoding((64,), STEEP_COST, others=10)


def test_who_asks_for_windows_gets_them_whatever_is_predicted() -> None:
    """They are no longer than a pass can verify, the row before them included, and than what is left."""
    drafter = Promising(WINDOW)
    assert [c.grows for c in choose(policy(drafter, (8,)), ["it"])] == [True]
    assert nodes(drafter, (8,)) == (7,)
    assert nodes(drafter, (64,), room=5) == (5,)
    assert nodes(drafter, (64,), max_draft=3) == (3,)
    assert nodes(drafter, (1,)) == (0,)


@pytest.mark.parametrize(
    ("lengths", "seconds_of_16", "expected"),
    [
        ([], 16.0, 0),
        ([3], 16.0, 1),  # 4 + 4 rows: the shape is the same, and they cost nothing
        ([4], 16.0, 0),  # 4 + 5 rows: 8 s more for 5 rows, which cost 5 s later
        ([4], 12.0, 0),  # 4 s more for rows that cost 5 * 0.75 = 3.75 s later
        ([4], 11.0, 1),  # 3 s more for rows that cost 5 * 0.6875 = 3.44 s later
        ([3, 3], 16.0, 1),
        ([3, 3], 9.0, 2),  # 1 s more for eight rows
        ([11], 9.0, 1),
        ([12], 9.0, 0),  # does not fit
        ([1, 1, 1, 1, 1, 1, 1], 9.0, 6),  # nor does the last of these
    ],
)
def test_unfinished_windows_join_where_that_is_cheaper_than_later(
    lengths: list[int], seconds_of_16: float, expected: int
) -> None:
    """A window of 3 tokens is ready, which makes 4 rows."""
    windows = [Held(3, 3, is_ready=True), *(Held(n, 20, is_ready=False) for n in lengths)]
    found = choose(policy(Windows(windows), (8, 16), cost(m8=8.0, m16=seconds_of_16)), ["it"] * len(windows))
    assert found[0] == Choice("it", 3, num_drawn=3, is_replay=True)
    assert [c.num_nodes for c in found[1:] if c.is_replay] == lengths[:expected]
    assert all(c.grows for c in found[1:] if not c.is_replay)


def test_windows_that_do_not_fit_wait_but_the_oldest_is_verified_as_far_as_it_fits() -> None:
    ready = Held(5, 5, is_ready=True)
    assert choose(policy(Windows([ready] * 3), (12,)), ["it"] * 3) == [
        *[Choice("it", 5, num_drawn=5, is_replay=True)] * 2, Choice("it", 5, waits=True)
    ]  # fmt: skip
    found = choose(policy(Windows([ready] * 2), (12,)), ["it"] * 2, others=8)
    assert found == [Choice("it", 3, num_drawn=3, is_replay=True), Choice("it", 5, waits=True)]


# Which rows share a pass.


@pytest.mark.parametrize(
    ("canonical", "fast", "seconds_of_16", "expected"),
    [
        (3, 2, 16.0, True),  # 5 rows fit into the 8 that run anyway
        (8, 2, 16.0, False),  # 8 s more for 2 rows, which take 2 s by themselves
        (8, 2, 9.5, True),  # 1.5 s more
        (0, 2, 16.0, False),
        (3, 0, 16.0, False),
        (15, 2, 9.0, False),  # does not fit
    ],
)
def test_fast_rows_join_where_that_is_cheaper_than_a_pass_of_their_own(
    canonical: int, fast: int, seconds_of_16: float, expected: bool
) -> None:
    found = policy(NOTHING, (8, 16), cost(m1=1.0, m8=8.0, m16=seconds_of_16))
    assert found.costs.joins(canonical, fast) is expected


def test_without_a_family_nothing_joins() -> None:
    assert not policy(NOTHING, (), row_budget=16).costs.joins(0, 3)
    assert not policy(NOTHING, (), row_budget=16).costs.joins(2, 3)


def test_more_rows_than_the_budget_are_called_the_policys_fault() -> None:
    with pytest.raises(AssertionError, match="17 rows in a canonical pass: the policy went over its budget, 16"):
        policy(NOTHING, (4, 16), row_budget=16).costs.canonical_shape(17)


def test_costs_need_not_grow_with_rows() -> None:
    """8 rows are cheaper than 4: that is the shape of few rows too, and drafts fill it."""
    costs = cost(m4=2.0, m8=1.0, m16=3.0)
    found = policy(NOTHING, (4, 8, 16), costs)
    assert [found.costs.canonical_shape(n) for n in (1, 4, 5, 8, 9, 16)] == [8, 8, 8, 8, 16, 16]
    assert nodes(Promising(Curve.chain(15, 1.0)), (4, 8, 16), costs) == (7,)
    assert nodes(Promising(Curve.chain(15, 1.0)), (4, 8, 16), cost(m4=2.0, m8=1.0, m16=1.5)) == (15,)


# How many nodes.


@pytest.mark.parametrize(("seconds_of_8", "acceptance", "expected"), [(1.1, 0.9, 4), (1.7, 0.9, 3), (1.1, 0.02, 3)])
def test_nodes_fill_the_shape_that_gives_most_a_second(seconds_of_8: float, acceptance: float, expected: int) -> None:
    """One row runs anyway: 3 nodes fill a shape of 4, where they are free, and 4 need one of 8."""
    drafter, costs = Promising(Curve.chain(4, acceptance)), cost(m4=1.0, m8=seconds_of_8)
    assert nodes(drafter, (4, 8), costs) == (expected,)
    without_a_family = cost(m1=1.0, m4=1.0, m5=seconds_of_8, m8=seconds_of_8)
    assert nodes(drafter, (), without_a_family, canonical=False) == (expected,)


@pytest.mark.parametrize(
    ("costs", "num_running", "host_seconds", "expected"),
    [
        (FLAT_COST, 1, 0.0, True),
        (cost(m1=1, m64=64), 1, 0.0, False),  # a row takes its own time
        (cost(m1=1, m64=64), 32, 0.0, False),
        (cost(m1=1, m4=1, m8=2, m64=16), 1, 0.0, True),
        (cost(m1=1, m4=1, m8=2, m64=16), 4, 0.0, False),
        (cost(m1=1, m4=1, m8=2, m64=16), 64, 0.0, False),  # no row is left
        (cost(m1=10, m64=73), 8, 0.0, True),  # 8 in 17, 24 in 33
        (cost(m1=10, m64=73), 8, 15.0, False),  # but a host that takes as long again
        (cost(m8=17, m16=32, m24=48), 8, 0.0, False),  # 6 % more at best
    ],
)
def test_drafts_can_pay_where_rows_cost_clearly_less_than_they_give(
    costs: CostTable, num_running: int, host_seconds: float, expected: bool
) -> None:
    found = policy(Promising(Curve.chain(8, 1.0)), (1, 2, 4, 8, 16, 32, 64), costs)
    found.rates.host_seconds = host_seconds
    assert found.drafts_can_pay(num_running, is_canonical=True) is expected
    found.rates.host_seconds = 1e6
    assert not found.drafts_can_pay(num_running, is_canonical=True), "what the host takes is looked at anew"


def test_a_full_shape_grants_nothing() -> None:
    drafter = Promising(Curve.chain(4, 0.9))
    assert nodes(drafter, (4, 8), cost(m4=1.0, m8=5.0), others=3) == (0,)
    assert nodes(drafter, (4, 8), others=7) == (0,)


def test_drafts_shrink_to_nothing_under_load() -> None:
    """As rows that run anyway grow, drafts lose their nodes, and in the end there are none."""
    drafter = Promising(Curve.chain(8, 0.8))
    costs = CostTable((1, 8, 64), (1.0, 1.1, 9.0), (0.0,) * 3)
    found = [nodes(drafter, (1, 2, 4, 8, 16, 32, 64), costs, count=n)[0] for n in (1, 2, 4, 8, 16, 32, 64)]
    assert found == sorted(found, reverse=True)
    assert (found[0], found[-1]) == (7, 0)


@pytest.mark.parametrize("is_canonical", [True, False])
def test_a_draft_is_weighed_against_the_tokens_of_those_that_run_beside_it(is_canonical: bool) -> None:
    """A node makes a pass of 33 rows 0.14 s longer. That is worth a chance of a third to one sequence, not to 33."""
    costs = CostTable((1, 8, 64), (1.0, 1.1, 9.0), (0.0,) * 3)
    family = tuple(range(1, 65)) if is_canonical else ()
    found = []
    for num_tokens in (0, 32):
        asking = turn(0, "it")
        chosen = policy(Promising(Curve.chain(8, 0.8)), family, costs, row_budget=64)
        chosen.choose([asking], is_canonical=is_canonical, other_rows=32, other_tokens=num_tokens, beside=0)
        found.append(asking.choice.num_nodes)
    assert found == [5, 0]


def test_drafts_stay_within_rows_and_room() -> None:
    """Rows go to the oldest; what can still be committed bounds the depth, and the engine's option too."""
    drafter = Promising(Curve.chain(6, 1.0))
    found = choose(policy(drafter, (16,)), ["it"] * 3)
    assert sum(1 + c.num_nodes for c in found) <= 16
    assert [c.num_nodes for c in found] == sorted((c.num_nodes for c in found), reverse=True)
    assert found[-1].reason == "no rows were left for a draft"
    assert nodes(drafter, (16,), room=2) == (2,)
    assert nodes(drafter, (16,), max_draft=4) == (4,)
    (none,) = choose(policy(drafter, (16,)), ["it"], room=0)
    assert (none.num_nodes, none.reason) == (0, "no room for a draft")


def test_a_tree_is_cut_where_the_request_ends() -> None:
    shape = TreeShape.parse("branch:2,2,1")
    drafter = Promising(Curve((Level(2, 0.9), Level(4, 0.8), Level(4, 0.7)), shape))
    assert [nodes(drafter, (16,), room=room) for room in (1, 2, 3, 9)] == [(2,), (6,), (10,), (10,)]


@pytest.mark.parametrize(("num_rows", "expected"), [(1, 9), (6, 9), (7, 9), (8, 3), (12, 3), (13, 3), (14, 0), (16, 0)])
def test_a_tree_is_granted_in_whole_levels(num_rows: int, expected: int) -> None:
    """A shape of 16 rows holds three or nine nodes of beam:3,3 or branch:3,2: never one more."""
    drafter = tree((3, 0.8), (6, 0.6))
    assert nodes(drafter, (16,), others=num_rows - 1) == (expected,)
    assert nodes(drafter, (), cost(m16=1.0), row_budget=16, others=num_rows - 1, canonical=False) == (expected,)


def test_choices_are_the_best_of_all() -> None:
    """Against trying every number of levels, draft passes included, for all sequences alike."""
    rng = random.Random(5)
    refused = 0
    for _ in range(400):
        family = tuple(sorted(rng.sample((8, 16, 32, 64), rng.randint(1, 4))))
        costs = CostTable(family, tuple(rng.uniform(1, 4) for _ in family), (0.0,) * len(family))
        seconds = rng.choice((None, rng.uniform(0.0, 0.8)))
        passes = None if seconds is None else cost(m1=seconds, m64=seconds)
        levels = [(rng.randint(1, 4), rng.uniform(0.3, 1.0) ** depth) for depth in range(1, rng.randint(2, 6))]
        count = rng.choice((1, 2, 4))
        others = rng.randint(0, 4)
        sunk = _seconds(costs, count + others) - _seconds(costs, count)  # what the prompts take
        rates = [count / _seconds(costs, count)]
        width, tokens = 0, 0.0
        for depth, (num_nodes, promised) in enumerate(levels, start=1):
            width, tokens = width + num_nodes, tokens + promised
            if count + others + count * width > family[-1]:
                break
            taken = _seconds(costs, count + others + count * width) - sunk + depth * (seconds or 0.0)
            rates.append(count * (1 + tokens) / taken)
        if len(rates) <= len(levels):
            continue  # what does not fit for all is another test's
        (found, *_) = nodes(tree(*levels, passes=passes), family, costs, count=count, others=others)
        best = max(rates[1:], default=0.0)
        is_worth_it = best > rates[0] * (1.0 if passes is None else WORTH_IT)
        whole = [0, *itertools.accumulate(num_nodes for num_nodes, _ in levels)]
        assert found == (whole[rates.index(best)] if is_worth_it else 0)
        refused += not found
    assert 10 < refused < 300


def _seconds(costs: CostTable, num_rows: int) -> float:
    return min(costs.seconds(m, 0) for m in costs.shapes if m >= num_rows)


# What drafts cost.


@pytest.mark.parametrize(("seconds", "expected"), [(0.0, 6), (0.1, 6), (0.3, 6), (0.6, 2), (1.0, 0), (5.0, 0)])
def test_draft_passes_count(seconds: float, expected: int) -> None:
    """One pass per level: 1.8 tokens in 1 + s seconds, 2.4 in 1 + 2 s, against 1 in 1 s."""
    drafter = tree((2, 0.8), (4, 0.6), passes=cost(m1=seconds, m64=seconds))
    (choice,) = choose(policy(drafter, (8,)), ["it"])
    assert choice.num_nodes == expected
    if not expected:
        predicted = max(1.8 / (1 + seconds), 2.4 / (1 + 2 * seconds))
        assert choice.reason.startswith(f"it predicted {predicted:.2f}x")


def test_sequences_share_their_draft_passes() -> None:
    """Four together: 7.2 tokens in 3.9 s, against 4 in 3 s. A pass for each would make that 7.2 in 6.6 s."""
    costs = cost(m1=1.0, m3=1.0, m4=3.0, m16=3.0)
    drafter = tree((2, 0.8), passes=cost(m1=0.9, m64=0.9))
    family = (1, 3, 4, 16)
    assert nodes(drafter, family, costs) == (0,), "1.8 tokens in 1.9 s, against 1 in 1 s"
    assert nodes(drafter, family, costs, count=4) == (2,) * 4
    assert nodes(tree((2, 0.8), passes=cost(m1=3.6, m64=3.6)), family, costs, count=4) == (0,) * 4


def test_passes_of_different_drafters_are_not_shared() -> None:
    """2 of one: 3 tokens in 1.3 s, against 2 in 1 s. 1 of each: 2.5 tokens in 1.3 s at best."""
    one, other = (tree((2, 0.5), passes=cost(m1=0.3, m64=0.3)) for _ in range(2))
    found = policy({"one": one, "other": other}, (16,))
    assert [c.num_nodes for c in choose(found, ["one", "one"])] == [2, 2]
    assert [c.num_nodes for c in choose(found, ["one", "other"])] == [0, 0]


def test_forced_drafts_are_drafted_whatever_they_cost() -> None:
    drafter = tree((2, 0.8), (4, 0.6), passes=cost(m1=50.0, m64=50.0), forced=True)
    assert nodes(drafter, (8,)) == (6,)
    assert nodes(drafter, (4,)) == (2,), "as far as they fit"
    (choice,) = choose(policy(drafter, (2,)), ["it"])
    assert (choice.num_nodes, choice.reason) == (0, "the draft does not fit into a pass")


# Which drafter, which shape.


@pytest.mark.parametrize(("stays", "expected"), [(False, 1), (True, 2)])
def test_what_can_be_drafted_later_is_drafted_as_far_as_it_saves_time(stays: bool, expected: int) -> None:
    """Two rows give most tokens a second; but one token is left then, and 2.2 + 2.0 seconds are more than 3.4 at once.

    A fourth row costs more than a pass of its own.
    """
    costs = cost(m1=2.0, m2=2.2, m3=3.4, m4=5.5, m5=7.6)
    drafter = Promising(Curve.chain(4, 0.999, stays=stays))
    assert choose(policy(drafter, (1, 2, 3, 4, 5), costs), ["it"])[0].num_nodes == expected
    dear = policy(drafter, (1, 2, 3, 4, 5), cost(m1=1.0, m2=2.5, m5=9.0))
    assert choose(dear, ["it"])[0].num_nodes == 0


def test_auto_takes_the_best_entry() -> None:
    good, bad, dear = Promising(Curve.chain(4, 0.9)), Promising(Curve.chain(4, 0.2)), tree((4, 0.9), passes=FLAT_COST)
    for order in itertools.permutations({"good": good, "bad": bad, "dear": dear, "none": NOTHING}.items()):
        (choice,) = choose(policy(dict(order), (8,)), [AUTO])
        assert (choice.drafter, choice.num_nodes) == ("good", 4)
    (choice,) = choose(policy({"dear": dear, "none": NOTHING}, (8,)), [AUTO])
    assert choice.num_nodes == 0


def test_reasons_are_those_of_the_drafters() -> None:
    (choice,) = choose(policy(NOTHING, (8,)), ["it"])
    assert (choice.num_nodes, choice.reason) == (0, "nothing to draft")
    (choice,) = choose(policy(Promising(Curve.chain(4, 0.5)), (1, 8), cost(m1=1.0, m8=9.0)), ["it"])
    assert (choice.num_nodes, choice.reason) == (0, "verifying a draft was not predicted to pay at this load")


def shapes_at(acceptance: float) -> Promising:
    """A chain and trees of a drafter with this acceptance, further children catching a third of what is missed."""
    curves = []
    for text in ("chain:4", "branch:3,2,1", "beam:4,5"):
        shape, reach, levels = TreeShape.parse(text), 1.0, []
        for children, count in zip(shape.branching, shape.keep, strict=True):
            reach *= 1 - (1 - acceptance) * 0.65 ** (children - 1)
            levels.append(Level(count, reach))
        curves.append(Curve(tuple(levels), shape, CHEAP))
    return Promising(*curves)


@pytest.mark.parametrize(
    ("seconds_of_32", "acceptance", "expected"),
    [
        (1.0, 0.6, "beam:4,5"),  # rows are free
        (1.6, 0.6, "beam:4,5"),
        (6.0, 0.9, "chain:4"),  # every row costs
        (6.0, 0.6, "chain:4"),
        (40.0, 0.3, "None"),
    ],
)
def test_trees_where_verification_is_flat_chains_where_it_is_steep(
    seconds_of_32: float, acceptance: float, expected: str
) -> None:
    family = (1, 2, 4, 5, 8, 16, 32)
    slope = (seconds_of_32 - 1.0) / 31
    costs = CostTable(family, tuple(1.0 + slope * (m - 1) for m in family), (0.0,) * len(family))
    (choice,) = choose(policy(shapes_at(acceptance), family, costs), ["it"])
    assert str(choice.shape) == expected
    assert bool(choice.num_nodes) is (expected != "None")


# A table that is looked up.


def test_entries_are_kept_until_a_drafter_or_the_load_has_changed() -> None:
    drafter = Promising(Curve.chain(4, 0.9))
    found = policy(drafter, (8, 16))
    for _ in range(20):
        choose(found, ["it"] * 2)
    assert drafter.num_asked == 1
    choose(found, ["it"] * 2, others=3)
    assert drafter.num_asked == 2
    drafter.version += 1
    choose(found, ["it"] * 2)
    assert drafter.num_asked == 3


def test_entries_are_made_anew_when_costs_have_moved() -> None:
    costs = replace(FLAT_COST, learns=True)
    drafter = Promising(Curve.chain(4, 0.9))
    found = policy(drafter, (8, 16), costs)
    for seconds, expected in ((1.0, 1), (2.0, 2)):  # as it was, and twice as long
        choose(found, ["it"])
        for _ in range(40):
            costs.observe(8, 10, seconds)
        choose(found, ["it"])
        assert drafter.num_asked == expected


def test_the_table_does_not_grow_without_end() -> None:
    found = policy(Promising(Curve.chain(4, 0.9)), (4096,))
    for others in range(5000):
        choose(found, ["it"], others=others % 4000, beside=others // 4000)
    assert len(found._entries) <= 4096


def test_a_model_drafter_learns_and_says_when() -> None:
    """A key stands for what it promises, until the version grows."""
    drafter = make_drafters(DraftSetup(backend=FakeBackend(num_stores=2), draft_cost=CHEAP))["model"]
    asking = turn(0, "model", tree=TreeShape.parse("branch:2,2"))

    def promised() -> float:
        (curve,) = drafter.curves(drafter.state(asking.sequence))
        first = curve.levels[0].tokens
        assert curve.levels == (Level(2, first), Level(4, pytest.approx(first**2)))
        return first

    first, key, version = promised(), drafter.state(asking.sequence), drafter.version
    assert first == pytest.approx(0.75 + 0.25 * 0.75 * 0.65)
    asking.draft, asking.verdict = Draft((1, 2), (-1, -1)), Verdict((0,), 5)
    for _ in range(8):
        drafter.observe(asking)
    assert promised() > first
    assert drafter.version == version, "second children were not tried"
    assert drafter.curves(key)[0].levels[0].tokens == first
    asking.verdict = Verdict((1,), 5)
    for _ in range(8):
        drafter.observe(asking)
    assert drafter.version > version
    assert drafter.curves(key)[0].levels[0].tokens > first
    before = promised()
    drafter.forget(turn(1, "none").sequence)
    assert promised() == before, "others that end say nothing of its drafts"


# `auto`, through the engine.


def test_one_that_drafts_does_not_slow_down_31_that_do_not() -> None:
    """32 tokens a second without drafts; 36 in 2 s with one of 4 nodes, which its own sequence alone would like."""
    backend = FakeBackend(num_slots=1024)
    drafters = {"none": NoDrafter(), "it": Adversary(lambda sequence, quota: Draft.chain((1,) * quota))}
    engine = Engine(backend, family=(32, 64), drafters=drafters, cost=cost(m32=1.0, m64=2.0))
    for i in range(32):
        params = SamplingParams(max_tokens=8 if i else 6)  # it ends first, and never runs alone
        engine.add(Request([i % 8, 3], params, speculation=Speculation("none" if i else "it")))
    outputs = collect(engine)
    assert outputs[0, 0].stats.drafted == 0
    alone_at_last = engine.add(Request([1, 3], SamplingParams(max_tokens=6), speculation=Speculation("it")))
    assert collect(engine)[alone_at_last, 0].stats.drafted > 0


def run_auto(*, window_len: int = 32, num_requests: int = 2, **options: object) -> Watched:
    watched = Watched(window_len, agreeing=True, **options)  # type: ignore[arg-type]
    for i in range(num_requests):
        watched.ask((0, 1, i), replace(SAMPLED, max_tokens=60), speculation=Speculation(AUTO))
    watched.finish()
    return watched


def test_auto_decodes_regularly_where_only_a_large_shape_is_canonical() -> None:
    watched = run_auto(family=(64,), cost=STEEP_COST)
    for samples in watched.streams.values():
        stats = samples[0].output.stats
        assert stats.chosen["decode"] > 40
        assert stats.replays >= 1
        assert stats.chosen_because.startswith("canonical passes predicted 0.")
    assert len(watched.passes) < 75


def test_auto_decodes_canonically_where_that_is_cheap() -> None:
    watched = run_auto(family=(2, 4, 8, 16), cost=STEEP_COST)
    for samples in watched.streams.values():
        stats = samples[0].output.stats
        assert stats.chosen["decode"] == stats.replays == stats.fast_passes == 0
        assert stats.chosen["plain"] + stats.chosen["suffix"] == stats.passes
        assert stats.chosen_because == NO_FASTER


def test_auto_learns_that_windows_are_not_confirmed() -> None:
    """All drafted tokens are wrong: after a few windows plain decoding promises more, and stays."""
    watched = run_auto(
        family=(64,),
        cost=STEEP_COST,
        decode=DecodeConfig(window_len=8, prior_weight=4.0, memory=0.9),
        redraw=AtRate(1.0, vocab_size=VOCAB_SIZE),
        num_requests=1,
    )
    stats = watched.streams[0][0].output.stats
    assert 1 <= stats.replays == stats.mismatches < 20
    assert stats.chosen["plain"] + stats.chosen["suffix"] > 20


def test_auto_is_not_misled_by_a_window_that_opens_beside_it() -> None:
    """Both sequences are behind their prompts: neither needs a canonical row, so both open windows."""
    watched = Watched(32, agreeing=True, family=(64,), cost=STEEP_COST)
    choosing = watched.ask((0, 1, 2), replace(SAMPLED, max_tokens=60), speculation=Speculation(AUTO))
    watched.ask((0, 1, 3), replace(SAMPLED, max_tokens=60), speculation=Speculation("decode"))
    watched.step()
    watched.step()
    assert watched.real_rows(watched.passes[-1].kind) == [2]
    assert isinstance(watched.decode.state(watched.sequence(choosing)), Held)
    watched.finish()


class Noted:
    """A drafter whose drafts are noted."""

    def __init__(self, inner: Drafter, drafts: list[Draft]) -> None:
        self._inner = inner
        self._drafts = drafts

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def draft(self, turns: Sequence[Turn]) -> Sequence[object]:
        found = self._inner.draft(turns)
        self._drafts += [d for d in found if isinstance(d, Draft) and len(d)]
        return found


def drafted_shapes(target: CostTable, draft: CostTable | None, *, menu: bool = False, requests: int = 1) -> list[Draft]:
    """Every draft of requests that leave the choice."""
    backend = FakeBackend(vocab_size=8, num_stores=2, num_slots=1024)
    backend.markov[1] = backend.markov[0]
    view = View.without({0, 1})
    setup = DraftSetup(backend=backend, draft_cost=draft, find_menu=lambda: menu_of(view) if menu else None)
    drafts: list[Draft] = []
    drafters = {name: Noted(drafter, drafts) for name, drafter in make_drafters(setup).items()}
    engine = Engine(backend, family=(4, 8, 16, 32, 64), drafters=drafters, cost=target)  # type: ignore[arg-type]
    for i in range(requests):
        params = SamplingParams(max_tokens=40, temperature=0.7, seed=i)
        engine.add(Request([i % 8, 3, 5], params, speculation=Speculation(AUTO)))
    collect(engine)
    return drafts


def test_auto_drafts_trees_where_rows_are_free_and_nothing_where_they_are_dear() -> None:
    flat = drafted_shapes(FLAT_COST, cost(m1=0.02, m64=0.02))
    assert any(not d.is_chain and len(d) >= 6 for d in flat)
    steep = drafted_shapes(cost(m4=1.0, m8=3.0, m16=9.0, m64=99.0), cost(m1=0.02, m64=0.02))
    assert max((len(d) for d in steep), default=0) <= 3
    dear = drafted_shapes(FLAT_COST, cost(m1=3.0, m64=3.0))
    assert not any(d.stored for d in dear)


def test_auto_weighs_two_models_by_what_they_cost() -> None:
    """The same acceptance is believed of both; whoever drafts cheaper is asked."""
    by_model = drafted_shapes(FLAT_COST, cost(m1=0.01, m64=0.01), menu=True)
    by_view = drafted_shapes(FLAT_COST, cost(m1=5.0, m64=5.0), menu=True)
    assert any(d.stored for d in by_model)
    assert by_view
    assert not any(d.stored for d in by_view)


def test_a_draft_model_that_does_not_pay_drafts_nothing_and_says_so() -> None:
    backend = FakeBackend(num_stores=2)

    def reason(draft: CostTable, *, force: bool = False) -> tuple[int, str]:
        setup = DraftSetup(backend=backend, draft_cost=draft, force=force)
        engine = Engine(backend, family=(4, 8, 16), drafters=make_drafters(setup))
        shape = TreeShape.parse("branch:2,2")
        engine.add(Request([1, 2, 3], SamplingParams(max_tokens=12), speculation=Speculation("model", tree=shape)))
        (output,) = collect(engine).values()
        return output.stats.drafted, output.stats.no_draft_reason

    drafted, why = reason(cost(m1=0.9, m64=0.9))
    # One level: 1 + 0.75 + 0.25 * 0.49 tokens in 1.9 s, against 1 in 1 s; two are no better.
    assert (drafted, why) == (
        0, "the draft model predicted 0.99x on this model and device; not drafting; --force to draft anyway"
    )  # fmt: skip
    assert reason(cost(m1=0.9, m64=0.9), force=True)[0] > 0
    assert reason(cost(m1=0.1, m64=0.1))[0] > 0


# Drafters that promise nonsense.

GARBAGE: dict[str, tuple[Level, ...]] = {
    "negative nodes": (Level(-3, 0.9), Level(2, 0.9)),
    "no nodes": (Level(0, 0.9),),
    "a negative level behind a good one": (Level(2, 0.9), Level(-2, 0.9)),
    "too many nodes": (Level(10**9, 0.9),),
    "too many levels": (Level(1, 0.9),) * 5000,
    "nodes that are no number": (Level(math.nan, 0.9), Level(2, 0.9)),  # type: ignore[arg-type]
    "half a node": (Level(1.5, 0.9), Level(1.5, 0.9)),  # type: ignore[arg-type]
    "endless nodes": (Level(math.inf, 0.9),),  # type: ignore[arg-type]
    "nodes in words": (Level("two", 0.9),),  # type: ignore[arg-type]
    "tokens that are no number": (Level(2, math.nan), Level(2, math.nan)),
    "endless tokens": (Level(2, math.inf), Level(2, -math.inf)),
    "negative tokens": (Level(2, -5.0),),
    "tokens in words": (Level(2, "all"),),  # type: ignore[arg-type]
    "more below than above": (Level(2, 0.1), Level(2, 0.9)),
    "something else": (None,),  # type: ignore[arg-type]
}


class Boaster(Adversary):
    """Promises these levels, and others beside them, and drafts as many nodes as it is granted."""

    def __init__(self, levels: tuple[Level, ...], *, is_forced: bool) -> None:
        super().__init__(lambda sequence, quota: Draft((1,) * int(quota), (-1,) * int(quota)))
        self._levels = levels
        self._is_forced = is_forced

    def curves(self, key: Hashable) -> tuple[Curve, ...]:
        curve = Curve(self._levels, cost=CHEAP, what="it", is_forced=self._is_forced)
        return curve, Curve.chain(3, math.nan), curve._replace(cost=None)


@pytest.mark.parametrize("is_forced", [False, True], ids=["free", "forced"])
@pytest.mark.parametrize("levels", GARBAGE.values(), ids=GARBAGE)
def test_nonsense_costs_at_most_speed(levels: tuple[Level, ...], is_forced: bool) -> None:
    backend = FakeBackend(vocab_size=8, context_len=32, num_slots=128)
    drafters = {"boaster": Boaster(levels, is_forced=is_forced), "none": NoDrafter()}
    engine = Engine(backend, family=(4, 8, 16), drafters=drafters, config=EngineConfig(num_slots=128, max_len=32))
    requests = [
        Request((1, 2, i), SamplingParams(max_tokens=12, seed=i), speculation=Speculation(name))
        for i in range(2)
        for name in ("boaster", AUTO)
    ]
    ids = [engine.add(r) for r in requests]
    outputs = collect(engine)
    for request_id, request in zip(ids, requests, strict=True):
        assert facts(outputs[request_id, 0]) == facts(alone(request, max_len=32)[0])
    engine.check()
    for pass_ in backend.passes:
        assert len(pass_.rows) <= 16


def test_no_draft_has_more_nodes_than_a_tree_may_have() -> None:
    """Levels are cut where the largest tree ends; what counts no whole nodes is a failure, and promises nothing."""

    def promised(*levels: Level) -> tuple[Curve, ...]:
        drafters = {"it": Promising(Curve(levels))}
        return DrafterSet(drafters, vocab_size=VOCAB_SIZE, max_tail=64).curves("it", "any")

    (found,) = promised(Level(100, 0.9), Level(100, 0.8), Level(100, 0.7))
    assert found.levels == (Level(100, 0.9), Level(100, 0.8))
    assert sum(level.num_nodes for level in found.levels) <= MAX_NODES
    assert promised(Level(2, 0.9), Level(-2, 0.9))[0].levels == (Level(2, 0.9),)
    assert promised(Level(2, 3.0))[0].levels == (Level(2, 1.0),)
    for count in (1.5, math.nan, math.inf, "3"):
        assert promised(Level(count, 0.9)) == ()  # type: ignore[arg-type]


# What costs are learned from.


class Noting(CostTable):
    """Notes what it is told of passes."""

    def observe_pass(self, pass_: Pass, seconds: float, num_rounds: int = 1) -> None:
        noted.append((pass_.kind, seconds))


noted: list[tuple[PassKind, float]] = []


class Slow(WrappedBackend):
    """A canonical pass takes 10 seconds, a fast one 1, while it is submitted."""

    now = 0.0

    def submit(self, pass_: Pass) -> Ticket:
        self.now += 10.0 if pass_.kind is PassKind.CANONICAL else 1.0
        return self.inner.submit(pass_)


def test_a_pass_is_timed_only_where_it_runs_alone() -> None:
    """Two passes of a step are in the air together: what one of them took cannot be told."""
    noted.clear()
    backend = Slow(FakeBackend())
    costs = Noting((1, 64), (1.0, 1.0), (0.0, 0.0), learns=True)
    drafters = {"none": NoDrafter()}
    engine = keep_apart(Engine(backend, family=(8,), drafters=drafters, cost=costs, clock=lambda: backend.now))
    engine.add(Request([1, 2], SamplingParams(max_tokens=12, deterministic=False)))
    for _ in range(4):
        engine.step()
    engine.add(Request([3, 2], SamplingParams(max_tokens=12)))
    collect(engine)
    assert set(noted) == {(PassKind.CANONICAL, 10.0), (PassKind.FAST, 1.0)}
