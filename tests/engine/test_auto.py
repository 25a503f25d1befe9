"""`auto` beside every fixed choice, where passes cost what given functions say: it is never more than 3 % slower.

The table that it chooses by is not told these functions: it was timed on a machine of another speed, with errors, and
learns from the passes of a short warm-up.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest

from tests.engine.test_policy import Promising, turn
from tests.support.adversaries import VOCAB_SIZE, collect
from tests.support.fake_backend import FakeBackend
from tests.support.faulty_backends import AgreeingFastPasses, AtRate, FaultyFastPasses
from tests.support.sabotages import Hasty, OfAnotherLoad
from verispec.backends.cost import CostTable
from verispec.backends.protocol import Pass, PassKind, PassResult
from verispec.config import EngineConfig
from verispec.engine import Engine, Request
from verispec.engine import engine as engine_module
from verispec.engine.policy import Policy
from verispec.spec.drafter import Curve, DrafterSet
from verispec.spec.none import NoDrafter
from verispec.spec.registry import DraftSetup, make_drafters
from verispec.spec.speculation import AUTO, Speculation
from verispec.types import SamplingParams

FAMILY = (1, 2, 4, 8, 16, 32, 64, 128)
TIMED = (1, 2, 4, 8, 16, 32, 64, 128)
CLOSE = 0.97
MAX_LEN = 168


@dataclass(frozen=True)
class Costs:
    """Seconds of a canonical pass by its rows, what part of that a fast one takes, and the canonical shapes."""

    canonical: Callable[[int], float]
    fast: Callable[[int], float] = lambda rows: 1.0
    family: tuple[int, ...] = FAMILY
    fast_weights: bool = False

    def seconds(self, num_rows: int, *, is_fast: bool) -> float:
        return self.canonical(num_rows) * (self.fast(num_rows) if is_fast else 1.0)

    def table(self, seed: int = 0, speed: float = 3.0) -> CostTable:
        """As timed when the machine was slower."""
        rng = random.Random(seed)

        def column(*, is_fast: bool) -> CostTable:
            base = tuple(speed * self.seconds(m, is_fast=is_fast) * rng.uniform(0.97, 1.03) for m in TIMED)
            return CostTable(TIMED, base, (0.0,) * len(TIMED), learns=True)

        table = column(is_fast=False)
        table.fast = column(is_fast=True) if self.fast(1) != 1 else None
        return table


def gpu(rows: int) -> float:
    return 1 + 0.16 * (rows - 1) / 7


def cpu(rows: int) -> float:
    return 0.2 + 0.8 * rows


COSTS = {
    "flat": Costs(gpu),
    "linear": Costs(cpu),
    "one shape": Costs(cpu, family=(64,)),
    "fast is half": Costs(gpu, lambda rows: 0.5, fast_weights=True),
    "fast weights for few rows": Costs(gpu, lambda rows: 0.4 if rows <= 8 else 1.0, fast_weights=True),
}


class Billed(FaultyFastPasses):
    """Every round of a pass takes what the costs say; a share of what fast passes draw is wrong."""

    def __init__(self, costs: Costs, acceptance: float, num_running: int) -> None:
        fake = FakeBackend(
            vocab_size=VOCAB_SIZE, num_slots=MAX_LEN * num_running, context_len=MAX_LEN, num_seq_rows=num_running + 1
        )
        if costs.fast_weights:
            fake.limits = replace(fake.limits, fast_weights="int4")
        super().__init__(AgreeingFastPasses(fake), AtRate(1 - acceptance, vocab_size=VOCAB_SIZE))
        self._costs = costs
        self.now = 0.0

    def run(self, pass_: Pass) -> PassResult:
        self.inner.inner.passes.clear()
        self.now += self._costs.seconds(len(pass_.rows), is_fast=pass_.kind is PassKind.FAST)
        return super().run(pass_)


def speed(costs: Costs, method: str, *, acceptance: float, num_running: int, num_new: int = 64) -> float:
    """Tokens a second of a wave of requests whose prompts are of many lengths, behind one to warm up."""
    backend, table = Billed(costs, acceptance, num_running), costs.table()
    drafters = make_drafters(DraftSetup(backend=backend, cost=table))
    engine = Engine(
        backend,
        family=costs.family,
        drafters={name: drafters[name] for name in ("none", "decode")},
        config=EngineConfig(
            num_slots=MAX_LEN * num_running,
            max_running=num_running,
            max_len=MAX_LEN,
            row_budget=128,
            prefix_cache=False,
        ),
        cost=table,
        clock=lambda: backend.now,
    )
    for _ in range(2):
        start = backend.now
        for i in range(num_running):
            params = SamplingParams(max_tokens=num_new, seed=i)
            prompt = [(i + j) % VOCAB_SIZE for j in range(60 + 7 * i % 40)]
            engine.add(Request(prompt, params, speculation=Speculation(method), is_streamed=False))
        outputs = collect(engine)
    return num_new * len(outputs) / (backend.now - start)


@pytest.mark.parametrize(
    ("name", "num_running", "acceptance"),
    [
        ("flat", 8, 0.999),
        ("linear", 8, 0.999),
        ("one shape", 8, 0.999),
        ("fast is half", 8, 0.6),
        ("fast weights for few rows", 1, 0.3),
        ("fast weights for few rows", 1, 0.9),
        ("fast weights for few rows", 8, 0.9),
    ],
)
def test_an_engine_is_as_quick_with_auto_as_with_the_best_drafter(
    name: str, num_running: int, acceptance: float
) -> None:
    """Prompts of many lengths, so that some decode while others still read theirs."""
    found = {m: speed(COSTS[name], m, acceptance=acceptance, num_running=num_running) for m in ("none", "decode", AUTO)}
    assert found[AUTO] >= CLOSE * max(found.values())


def short_answers(method: str) -> float:
    """Eight answers of 32 tokens, which end one by one, where a pass of 64 rows is the only canonical one."""
    return speed(COSTS["one shape"], method, acceptance=0.999, num_running=8, num_new=32)


def test_short_answers_are_as_quick_with_auto_as_with_the_best_drafter() -> None:
    found = {method: short_answers(method) for method in ("none", "decode", AUTO)}
    assert found[AUTO] >= CLOSE * max(found.values())


def test_control_windows_that_do_not_wait_for_each_other_are_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each that is ready takes a pass of 64 rows for itself."""
    patient = short_answers(AUTO)
    monkeypatch.setattr(engine_module, "Policy", Hasty)
    assert short_answers(AUTO) < 0.97 * patient


def test_costs_of_another_load_are_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a policy that looks up entries of another crowd decodes windows where they do not pay."""
    best = speed(COSTS["one shape"], "decode", acceptance=0.999, num_running=8)
    monkeypatch.setattr(engine_module, "Policy", OfAnotherLoad)
    assert speed(COSTS["one shape"], AUTO, acceptance=0.999, num_running=8) < 0.9 * best


def test_fast_weights_draw_nothing_but_windows() -> None:
    """A request that asked for no determinism keeps what it is given, so the model's own weights serve it."""
    backend, found = Billed(COSTS["fast is half"], 0.9, 2), list[bool]()
    run = backend.run
    backend.run = lambda pass_: found.append(pass_.only_drafts) or run(pass_)
    for method, is_deterministic, is_cheap in (("none", False, False), ("decode", True, True), ("decode", False, True)):
        engine = Engine(
            backend, family=FAMILY, drafters=make_drafters(DraftSetup(backend=backend, draft_len=4)), clock=lambda: 0.0
        )
        params = SamplingParams(max_tokens=40, deterministic=is_deterministic)
        engine.add(Request([1, 2, 3], params, speculation=Speculation(method)))
        found.clear()
        (output,) = collect(engine).values()
        assert any(found) is is_cheap
        assert output.stats.drafted == (0 if method == "none" else sum(found))
        assert found.count(False) == output.stats.passes + output.stats.fast_passes


# Every length of drafts and windows, for sequences that all decode.

DRAFT_LEN, WINDOW_LEN = 8, 16


def tokens(acceptance: float, num_nodes: int) -> float:
    """Committed by a verification, on average."""
    return sum(acceptance**i for i in range(num_nodes + 1))


def drafting(costs: Costs, count: int, acceptance: float, num_nodes: int) -> float:
    """Tokens a second with so many nodes for each of so many sequences; 0 where they do not fit."""
    num_rows = count * (num_nodes + 1)
    fitting = [m for m in costs.family if m >= num_rows]
    return count * tokens(acceptance, num_nodes) / costs.seconds(min(fitting), is_fast=False) if fitting else 0.0


def replaying(costs: Costs, count: int, acceptance: float, num_nodes: int) -> float:
    """The same if fast rounds draw them, all together, and as many windows as fit are replayed in a pass."""
    seconds = num_nodes * costs.seconds(count, is_fast=True)
    left = count
    while left:
        windows = min(left, costs.family[-1] // (num_nodes + 1))
        seconds += costs.seconds(min(m for m in costs.family if m >= windows * (num_nodes + 1)), is_fast=False)
        left -= windows
    return count * tokens(acceptance, num_nodes) / seconds


def choice(costs: Costs, count: int, odds: Odds, table: CostTable, kind: type[Policy] = Policy) -> float:
    """Tokens a second of what the policy chooses for each, when it has seen each shape thrice; all must do alike."""
    how = {"by_backend": True, "cost": table.fast or replace(table)} if costs.fast_weights else {"by_fast_rounds": True}
    drafters = {
        "none": NoDrafter(),
        "drafts": Promising(Curve.chain(DRAFT_LEN, odds.drafts)),
        "decode": Promising(Curve.chain(WINDOW_LEN, odds.windows, **how)),
    }
    found = DrafterSet(drafters, vocab_size=VOCAB_SIZE, max_tail=64)
    policy = kind(costs.family, table, found, row_budget=costs.family[-1], max_draft=None, max_burst=16)
    for shape in TIMED * 3:
        table.observe(shape, 0, costs.seconds(shape, is_fast=False))
        if not costs.fast_weights:
            table.observe(shape, 0, costs.seconds(shape, is_fast=True))
    turns = [turn(i, AUTO) for i in range(count)]
    policy.choose(turns, is_canonical=True, other_rows=0, other_tokens=0, beside=0)
    assert len({t.choice for t in turns}) == 1
    chosen = turns[0].choice
    if chosen.drafter == "decode":
        return replaying(costs, count, odds.windows, chosen.num_nodes)
    return drafting(costs, count, odds.drafts, chosen.num_nodes)


def best(costs: Costs, count: int, odds: Odds) -> float:
    return max(
        *(drafting(costs, count, odds.drafts, n) for n in range(DRAFT_LEN + 1)),
        *(replaying(costs, count, odds.windows, n) for n in range(1, WINDOW_LEN + 1)),
    )


class Odds(NamedTuple):
    """Acceptance of what is drafted, and of what fast rounds drew."""

    drafts: float
    windows: float


ODDS = tuple(Odds(*both) for both in itertools.product((0.3, 0.6, 0.9), repeat=2))


@pytest.mark.parametrize("count", [1, 8, 32, 128])
@pytest.mark.parametrize("name", COSTS)
def test_what_is_chosen_is_close_to_the_best_of_all_lengths(name: str, count: int) -> None:
    costs = COSTS[name]
    if count > costs.family[-1]:
        costs = replace(costs, family=FAMILY)
    for seed, odds in enumerate(ODDS):
        assert choice(costs, count, odds, costs.table(seed)) >= CLOSE * best(costs, count, odds), odds


def test_a_policy_of_another_load_or_of_other_costs_is_not() -> None:
    """The controls: eight times the crowd, a table of the other kind of machine, one that knows of no fast weights."""
    linear, flat, cheap = (COSTS[name] for name in ("linear", "flat", "fast weights for few rows"))
    good = Odds(0.9, 0.9)
    assert choice(flat, 1, good, flat.table(), OfAnotherLoad) < CLOSE * best(flat, 1, good)
    assert choice(linear, 8, good, replace(flat.table(), learns=False)) < CLOSE * best(linear, 8, good)
    windows = Odds(0.01, 0.9)
    assert choice(cheap, 8, windows, cheap.table()) >= CLOSE * best(cheap, 8, windows)
    assert choice(cheap, 8, windows, replace(cheap.table(), fast=None)) < CLOSE * best(cheap, 8, windows)
