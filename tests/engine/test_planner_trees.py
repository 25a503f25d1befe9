"""What the planner grants to draft trees at made-up costs, and that drafters may say what they like of theirs."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from tests.support.adversaries import Adversary, alone, collect, facts
from tests.support.fake_backend import FakeBackend
from tests.support.skipping import menu_of
from verispec.backends.cost import FLAT_COST, CostTable
from verispec.backends.protocol import View
from verispec.config import EngineConfig
from verispec.engine import Engine, Request
from verispec.engine.planner import Load, Planner
from verispec.kv import Lease
from verispec.spec.drafter import AUTO, Level, Offer, _in_range
from verispec.spec.none import NoDrafter
from verispec.spec.plan import SequencePlan
from verispec.spec.registry import DraftSetup, make_drafters
from verispec.tree import MAX_NODES, TreeShape
from verispec.types import Draft, SamplingParams, SequenceView, Verdict

NOTHING = Offer.nothing("nothing to draft")
CHEAP = CostTable((1, 64), (0.05, 0.05), (0.0, 0.0))


def cost(**seconds: float) -> CostTable:
    """Seconds of a pass by its rows, `m8=1.5`; contexts cost nothing."""
    shapes = tuple(int(name[1:]) for name in seconds)
    return CostTable(shapes, tuple(seconds.values()), (0.0,) * len(shapes))


def tree(*levels: tuple[int, float], passes: CostTable | None = None, forced: bool = False) -> Offer:
    """An offer of levels (nodes, expected tokens)."""
    listed = tuple(Level(*level) for level in levels)
    return Offer(sum(n for n, _ in levels), 0.5, cost=passes, what="it", is_forced=forced, levels=listed)


def whole_levels(offer: Offer) -> set[int]:
    """The numbers of nodes that whole levels make."""
    return {0, *itertools.accumulate(level.num_nodes for level in offer.all_levels)}


def rows(count: int) -> Load:
    return Load(count, 10 * count)


# Whole levels


@pytest.mark.parametrize(
    ("num_rows", "expected"),
    [(1, 9), (6, 9), (7, 9), (8, 3), (12, 3), (13, 3), (14, 0), (16, 0)],
)
def test_a_tree_is_granted_in_whole_levels(num_rows: int, expected: int) -> None:
    """A shape of 16 rows holds three, six or nine nodes of beam:3,3 or branch:3,2: never one more."""
    offer = tree((3, 0.8), (6, 0.6))
    assert Planner((16,), FLAT_COST).quotas([offer], rows(num_rows), canonical=True).quotas == (expected,)
    assert Planner((), cost(m16=1.0)).quotas([offer], rows(num_rows), canonical=False).quotas == (expected,)


def test_levels_of_many_offers_are_taken_by_their_worth_and_never_out_of_order() -> None:
    """The better of two trees first, level by level; a good level below a bad one waits for it."""
    offers = [tree((2, 0.9), (2, 0.2)), tree((2, 0.5), (2, 0.49)), tree((4, 0.1), (1, 0.1))]
    planner = Planner((3, 5, 7, 9, 11, 15, 16), FLAT_COST)
    granted = [Planner((shape,), FLAT_COST).quotas(offers, rows(3), canonical=True).quotas for shape in planner.family]
    assert granted == [(0, 0, 0), (2, 0, 0), (2, 2, 0), (2, 4, 0), (4, 4, 0), (4, 4, 4), (4, 4, 5)]


def test_quotas_of_trees_are_the_best_of_all_fills() -> None:
    """Against trying every number of levels in the order of their worth, draft passes included."""
    rng = random.Random(5)
    refused = 0
    for _ in range(400):
        family = tuple(sorted(rng.sample((4, 8, 16, 32, 64), rng.randint(1, 4))))
        costs = CostTable(family, tuple(rng.uniform(1, 4) for _ in family), (0.0,) * len(family))
        seconds = rng.uniform(0.0, 0.8)
        passes = cost(m1=seconds, m64=seconds)
        offers = []
        for _ in range(rng.randint(1, 4)):
            reach = [rng.uniform(0.3, 1.0) ** depth for depth in range(1, rng.randint(2, 6))]
            offers.append(tree(*((rng.randint(1, 5), tokens) for tokens in reach), passes=passes))
        load = rows(rng.randint(1, max(family)))
        quotas, predicted = Planner(family, costs).quotas(offers, load, canonical=True)
        assert all(q in whole_levels(o) for q, o in zip(quotas, offers, strict=True))
        rates = [rate_of(taken, len(offers), load, costs, seconds) for taken in prefixes(offers)]
        best = max((rate for rate in rates[1:] if rate), default=rates[0])
        assert predicted == pytest.approx(best / rates[0])
        assert (sum(quotas) > 0) == (best >= 1.05 * rates[0])
        refused += not sum(quotas)
    assert 50 < refused < 350


Taken = list[tuple[int, int, Level]]  # offer, depth


def prefixes(offers: Sequence[Offer]) -> list[Taken]:
    """All levels by their worth per node, an offer's own in their order: the first of them, one more each time."""
    listed = []
    for i, offer in enumerate(offers):
        worth = math.inf
        for depth, level in enumerate(offer.levels):
            worth = min(worth, level.tokens / level.num_nodes)
            listed.append(((-worth, depth, i), (i, depth, level)))
    ordered = [taken for _, taken in sorted(listed, key=lambda pair: pair[0])]
    return [ordered[:count] for count in range(len(ordered) + 1)]


def rate_of(taken: Taken, num_offers: int, load: Load, costs: CostTable, pass_seconds: float) -> float:
    """Tokens a second with these levels; 0 where they do not fit."""
    num_rows = load.num_rows + sum(level.num_nodes for _, _, level in taken)
    shapes = [m for m in costs.shapes if m >= num_rows]
    if not shapes:
        return 0.0
    num_passes = len({depth for _, depth, _ in taken})
    tokens = num_offers + sum(level.tokens for _, _, level in taken)
    return tokens / (min(costs.seconds(m, 0) for m in shapes) + num_passes * pass_seconds)


# What drafts cost


@pytest.mark.parametrize(("seconds", "expected"), [(0.0, 6), (0.1, 6), (0.3, 6), (0.6, 2), (1.0, 0), (5.0, 0)])
def test_draft_passes_count(seconds: float, expected: int) -> None:
    """One pass per level: 1.8 tokens in 1 + s seconds, 2.4 in 1 + 2 s, against 1 in 1 s."""
    offer = tree((2, 0.8), (4, 0.6), passes=cost(m1=seconds, m64=seconds))
    quotas, predicted = Planner((8,), FLAT_COST).quotas([offer], rows(1), canonical=True)
    assert quotas == (expected,)
    assert predicted == pytest.approx(max(1.8 / (1 + seconds), 2.4 / (1 + 2 * seconds)))


def test_sequences_share_their_draft_passes() -> None:
    """A pass of 0.9 s is too much for one sequence and a bargain for four."""
    passes = cost(m1=0.9, m64=0.9)
    offer = tree((2, 0.8), passes=passes)
    planner = Planner((16,), FLAT_COST)
    assert planner.quotas([offer], rows(1), canonical=True).quotas == (0,)
    many = planner.quotas([offer] * 4, rows(4), canonical=True)
    assert many.quotas == (0,) * 4, "all of them together gain as little: 7.2 tokens in 1.9 s, against 4 in 1"
    beside = [tree((2, 0.8)) for _ in range(3)]  # free drafts of others need no draft pass
    assert planner.quotas([offer, *beside], rows(4), canonical=True).quotas == (0, 2, 2, 2)


def test_passes_of_different_drafters_are_not_shared() -> None:
    one, other = (cost(m1=0.3, m64=0.3) for _ in range(2))
    planner = Planner((16,), FLAT_COST)
    together = planner.quotas([tree((2, 0.5), passes=one)] * 2, rows(2), canonical=True).predicted
    apart = [tree((2, 0.5), passes=one), tree((2, 0.5), passes=other)]
    found = planner.quotas(apart, rows(2), canonical=True).predicted
    assert together == pytest.approx(3 / 1.3 / 2)
    assert found is not None
    assert found < 1.05, "2.5 tokens in 1.3 s or 3 in 1.6 s, against 2 in 1"


def test_forced_drafts_are_drafted_whatever_they_cost() -> None:
    offer = tree((2, 0.8), (4, 0.6), passes=cost(m1=50.0, m64=50.0), forced=True)
    quotas, predicted = Planner((8,), FLAT_COST).quotas([offer], rows(1), canonical=True)
    assert quotas == (6,)
    assert predicted is not None
    assert predicted < 0.1
    assert Planner((4,), FLAT_COST).quotas([offer], rows(1), canonical=True).quotas == (2,), "as far as they fit"


def test_a_crowd_leaves_nothing_for_trees() -> None:
    """As rows that run anyway grow, trees lose their levels, and in the end there are none."""
    offer = tree((3, 0.8), (6, 0.6), (6, 0.5), passes=CHEAP)
    planner = Planner((8, 16, 32), cost(m8=1.0, m16=1.2, m32=2.4))
    granted = [planner.quotas([offer] * n, rows(n), canonical=True).quotas for n in (1, 2, 4, 8, 16, 24, 32)]
    shares = [sum(quotas) / len(quotas) for quotas in granted]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == 15
    assert shares[-1] == 0
    assert all(q in whole_levels(offer) for quotas in granted for q in quotas)


# Which shape


def offers_at(acceptance: float) -> dict[str, Offer]:
    """A chain and trees of a drafter with this acceptance, further children catching a third of what is missed."""
    found = {}
    for text in ("chain:4", "branch:3,2,1", "beam:4,5"):
        shape, reach, levels = TreeShape.parse(text), 1.0, []
        for children, count in zip(shape.branching, shape.keep, strict=True):
            reach *= 1 - (1 - acceptance) * 0.65 ** (children - 1)
            levels.append((count, reach))
        found[text] = tree(*levels, passes=CHEAP)
    return found


def best_shape(planner: Planner, acceptance: float, num_rows: int = 1) -> str:
    offers = offers_at(acceptance)
    best = max(offers, key=lambda name: planner.promise(offers[name], rows(num_rows)))
    return best if sum(planner.quotas([offers[best]], rows(num_rows), canonical=True).quotas) else "nothing"


@pytest.mark.parametrize(
    ("seconds_of_32", "acceptance", "expected"),
    [
        (1.0, 0.6, "beam:4,5"),  # rows are free
        (1.6, 0.6, "beam:4,5"),
        (6.0, 0.9, "chain:4"),  # every row costs
        (6.0, 0.6, "chain:4"),
        (40.0, 0.3, "nothing"),
    ],
)
def test_trees_where_verification_is_flat_chains_where_it_is_steep(
    seconds_of_32: float, acceptance: float, expected: str
) -> None:
    family = (1, 2, 4, 5, 8, 16, 32)
    slope = (seconds_of_32 - 1.0) / 31
    costs = CostTable(family, tuple(1.0 + slope * (m - 1) for m in family), (0.0,) * len(family))
    assert best_shape(Planner(family, costs), acceptance) == expected


# Through the engine


def drafted_shapes(target: CostTable, draft: CostTable | None, *, menu: bool = False, requests: int = 1) -> list[Draft]:
    """Every draft of requests that leave the choice."""
    backend = FakeBackend(vocab_size=8, num_stores=2, num_slots=1024)
    backend.markov[1] = backend.markov[0]
    view = View(frozenset({0, 1}))
    setup = DraftSetup(backend=backend, draft_cost=draft, find_menu=lambda: menu_of(view) if menu else None)
    engine = Engine(backend, family=(4, 8, 16, 32, 64), drafters=make_drafters(setup), cost=target)
    for i in range(requests):
        params = SamplingParams(max_tokens=40, temperature=0.7, seed=i)
        engine.add(Request([i % 8, 3, 5], params, drafter=AUTO))
    drafts: list[Draft] = []
    while engine.has_work:
        plan = engine._scheduler.plan()
        drafts += engine._drafters.advance(plan)
        engine.step()
    return [d for d in drafts if len(d)]


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
    assert not any(d.stored for d in by_view)


def test_a_draft_model_that_does_not_pay_drafts_nothing_and_says_so() -> None:
    backend = FakeBackend(num_stores=2)

    def reason(draft: CostTable, *, force: bool = False) -> tuple[int, str]:
        setup = DraftSetup(backend=backend, draft_cost=draft, force=force)
        engine = Engine(backend, family=(4, 8, 16), drafters=make_drafters(setup))
        shape = TreeShape.parse("branch:2,2")
        engine.add(Request([1, 2, 3], SamplingParams(max_tokens=12), drafter="model", tree=shape))
        (output,) = collect(engine).values()
        return output.stats.drafted, output.stats.no_draft_reason

    drafted, why = reason(cost(m1=0.9, m64=0.9))
    # One level: 1 + 0.75 + 0.25 * 0.35 tokens in 1.9 s, against 1 in 1 s; two are no better.
    assert (drafted, why) == (
        0, "the draft model predicted 0.97x on this model and device; not drafting; --force to draft anyway"
    )  # fmt: skip
    assert reason(cost(m1=0.9, m64=0.9), force=True)[0] > 0
    assert reason(cost(m1=0.1, m64=0.1))[0] > 0


class Asking:
    """A sequence, as far as offers look at it."""

    token_ids = (1, 2, 3)
    computed_len = 2
    params = SamplingParams(temperature=1.0)
    drafter = "model"

    def __init__(self, shape: str) -> None:
        self.tree = TreeShape.parse(shape)


def test_offers_are_remembered_until_something_is_learned_and_not_without_end() -> None:
    backend = FakeBackend(num_stores=2)
    drafter = make_drafters(DraftSetup(backend=backend, draft_cost=CHEAP))["model"]
    asking = Asking("branch:2,2")
    first = drafter.offer(asking, 9)  # type: ignore[arg-type]
    assert drafter.offer(asking, 9) is first  # type: ignore[arg-type]
    assert first.levels == (Level(2, pytest.approx(0.8375)), Level(4, pytest.approx(0.8375**2)))
    drafter.observe(_plan_of(asking), Draft((1, 2), (-1, -1)), Verdict((0,), 5))
    second = drafter.offer(asking, 9)  # type: ignore[arg-type]
    assert second.acceptance > first.acceptance
    drafter.forget(0)
    assert first.acceptance < drafter.offer(asking, 9).acceptance < second.acceptance  # type: ignore[arg-type]
    for width, depth in itertools.product(range(1, 33), range(1, 9)):
        drafter.offer(Asking(f"beam:{width},{depth}"), 9)  # type: ignore[arg-type]
        drafter.offer(Asking(f"branch:{width},{depth}" if width * depth < 200 else "chain:1"), 9)  # type: ignore[arg-type]
    assert len(drafter._offers) <= 256  # type: ignore[attr-defined]


def _plan_of(asking: Asking) -> SequencePlan:
    return SequencePlan(asking, 0, 1, 2, 1, 2, Lease(), 0, (), completes=True)  # type: ignore[arg-type]


# Drafters that say nonsense of their levels


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
    """Offers these levels, also as alternatives, and drafts as many nodes as it is granted."""

    def __init__(self, levels: tuple[Level, ...], *, is_forced: bool) -> None:
        super().__init__(lambda sequence, quota: Draft((1,) * int(quota), (-1,) * int(quota)))
        self._levels = levels
        self._is_forced = is_forced

    def offer(self, sequence: SequenceView, limit: int) -> Offer:
        offer = Offer(8, 0.9, levels=self._levels, cost=CHEAP, what="it", is_forced=self._is_forced)
        return offer._replace(alternatives=(offer, Offer(3, math.nan), offer._replace(acceptance=-1.0)))


@pytest.mark.parametrize("is_forced", [False, True], ids=["free", "forced"])
@pytest.mark.parametrize("levels", GARBAGE.values(), ids=GARBAGE)
def test_nonsense_costs_at_most_speed(levels: tuple[Level, ...], is_forced: bool) -> None:
    backend = FakeBackend(vocab_size=8, context_len=32, num_slots=128)
    drafters = {"boaster": Boaster(levels, is_forced=is_forced), "none": NoDrafter()}
    engine = Engine(backend, family=(4, 8, 16), drafters=drafters, config=EngineConfig(num_slots=128, max_len=32))
    requests = [Request((1, 2, i), SamplingParams(max_tokens=12, seed=i), drafter=name) for i in range(2) for name in
                ("boaster", AUTO)]  # fmt: skip
    ids = [engine.add(r) for r in requests]
    outputs = collect(engine)
    for request_id, request in zip(ids, requests, strict=True):
        assert facts(outputs[request_id, 0]) == facts(alone(request, max_len=32)[0])
    engine.check()
    for pass_ in backend.passes:
        assert len(pass_.rows) <= 16


def test_no_draft_has_more_nodes_than_a_tree_may_have() -> None:
    """Levels are cut where the request ends and where the largest tree does."""
    offer = Offer(10**6, 0.9, levels=(Level(100, 0.9), Level(100, 0.8), Level(100, 0.7)))
    assert _in_range(offer, 50).levels == (Level(100, 0.9), Level(100, 0.8))
    assert _in_range(offer, 50).max_nodes == 200 <= MAX_NODES
    assert _in_range(offer, 1).max_nodes == 100
    assert _in_range(Offer(9, 0.9), 4).max_nodes == 4
    for count in (1.5, math.nan, math.inf, "3"):
        with pytest.raises(ValueError, match="whole nodes"):  # which the set of drafters takes for a failure
            _in_range(Offer(count, 0.9), 4)  # type: ignore[arg-type]
