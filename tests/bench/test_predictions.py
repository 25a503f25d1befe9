"""Speed-ups that are predicted, by made-up costs, and on a device whose times are known: answers are short and long."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.far_drafts import FarDrafts, Seconds
from verispec.backends.cost import CostTable
from verispec.backends.protocol import View
from verispec.config import EngineConfig
from verispec.engine import Engine
from verispec.spec.drafter import Drafter
from verispec.types import SamplingParams, SequenceStats

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import drafting
import round_costs
import speculation

VOCAB, CONTEXT_LEN, EOS = 64, 1024, 3
FORCED, CHAIN = drafting.Arm("forced", "model, forced"), drafting.Arm("chain", "model, full", "chain:4")
LONG_CHAIN, BEAM = drafting.Arm("long", "model, full", "chain:21"), drafting.Arm("beam", "model, full", "beam:2,3")
ARMS = [drafting.NONE, FORCED, CHAIN, LONG_CHAIN, BEAM]


def made_up_costs(rounds: dict[object, round_costs.RoundTime]) -> round_costs.Costs:
    costs = object.__new__(round_costs.Costs)
    costs._rounds, costs._contexts, costs._leaves_out, costs._fits_rows = rounds, (100, 300), True, True
    costs._known = {"none": ([1, 3], [1.0, 1.5]), "model": ([1], [0.5])}
    return costs


def run_of(seconds: float, num_rounds: int, *answers: tuple[int, int]) -> drafting.Run:
    """Answers of so many tokens, in so many passes each."""
    outputs = [SimpleNamespace(token_ids=range(n), stats=SequenceStats(passes=passes)) for n, passes in answers]
    return drafting.Run(outputs, seconds, num_rounds, prompt_len=100 - answers[0][0] / 2)  # type: ignore[arg-type]


def flat(seconds: float, idle: float = 0.0) -> round_costs.RoundTime:
    return round_costs.RoundTime(seconds, seconds, idle)


def test_predictions_are_tokens_by_cost() -> None:
    """E / (N c + v) of two tokens a pass, two draft passes at half a step each; fast passes are the target's, too."""
    costs = made_up_costs({})
    stats = SequenceStats(passes=1, fast_passes=9, draft_passes=20, drafted=20)
    run = drafting.Run([SimpleNamespace(token_ids=range(20), stats=stats)], 1.0)  # type: ignore[list-item]
    arm = drafting.Arm("", "model, full", "chain:2")
    assert costs.predicted(arm, "model", None, 1, [run], [run]) == pytest.approx(2 / 2.5)


def test_what_is_fixed_without_drafts_is_fixed_with_them() -> None:
    """6 plain rounds of a second and 2 idle ones, and 3 s of something else; 2 rounds of 2 s with drafts, 4 idle."""
    round_ = round_costs.round_of(BEAM, {"model": drafting.Drafts(View(), 1, 4)}, 1)
    assert round_ is not None
    costs = made_up_costs({1: flat(1.0, 0.25), round_: flat(2.0, 0.5)})
    plain, drafted = run_of(9.5, 8, (6, 6)), run_of(99.0, 6, (6, 2))
    assert costs.predicted(BEAM, "model", round_, 1, [drafted], [plain]) == pytest.approx(9.5 / (4 + 2 + 3))
    faster = run_of(3.25, 8, (6, 6))  # than its rounds when they were timed, by half: so are those with drafts
    assert costs.predicted(BEAM, "model", round_, 1, [drafted], [faster]) == pytest.approx(6.5 / (4 + 2))
    waits = replace(drafted, num_waits=2)  # each a draft pass of half a second that the host waits for
    costs._rounds[1] = costs._rounds[1]._replace(trip=0.75)
    assert costs.predicted(BEAM, "model", round_, 1, [waits], [plain]) == pytest.approx(9.5 / (9 + 2 * 1.25))
    behind = replace(drafted, num_catch_ups=2)  # the same, and nobody waits
    assert costs.predicted(BEAM, "model", round_, 1, [behind], [plain]) == pytest.approx(9.5 / (9 + 2 * 0.5))
    both = costs.predicted(BEAM, "model", round_, 1, [drafted, drafted], [plain, faster])
    assert both == pytest.approx((9.5 + 3.25) / (9 + 3))
    assert costs.predicted(BEAM, "model", None, 1, [drafted], [plain]) is None
    assert costs.predicted(BEAM, "model", round_.of(2), 2, [drafted], [plain]) is None


def test_other_answers_are_compared_by_seconds_a_token() -> None:
    arm = drafting.Arm("RSD", "model, full", "beam:2,3", speculation.Accept.RECURSIVE)
    round_ = round_costs.round_of(arm, {"model": drafting.Drafts(View(), 1, 4)}, 1)
    assert round_ is not None
    costs = made_up_costs({1: flat(1.0), round_: flat(2.0)})
    found = costs.predicted(arm, "model", round_, 1, [run_of(99.0, 4, (12, 4))], [run_of(6.0, 6, (6, 6))])
    assert found == pytest.approx((6 / 6) / (8 / 12))


def test_rounds_take_longer_with_more_context() -> None:
    found = round_costs.RoundTime(1.0, 2.0, 0.0)
    assert [found.at(n, (100, 300)) for n in (100, 200, 300, 500)] == [1.0, 1.5, 2.0, 3.0]
    assert round_costs.RoundTime(1.0, 0.9, 0.0).at(300, (100, 300)) == 1.0  # noise
    assert found.at(400, (100, 100)) > 0


def test_predictions_of_a_batch_end_with_its_slowest_answer() -> None:
    """Four answers of 6 tokens; three drafted them in 2 rounds, one in 5."""
    round_ = round_costs.round_of(BEAM, {"model": drafting.Drafts(View(), 1, 4)}, 4)
    assert round_ is not None
    assert round_costs.sizes_up_to(4) == [1, 2, 4]
    took = {1: 1.0, 2: 1.0, 4: 1.5, round_.of(1): 2.0, round_.of(2): 2.0, round_: 3.0}
    costs = made_up_costs({key: flat(seconds) for key, seconds in took.items()})
    run, plain = run_of(99.0, 5, (6, 2), (6, 2), (6, 5), (6, 2)), run_of(6 * 1.5, 6, *[(6, 6)] * 4)
    assert costs.predicted(BEAM, "model", round_, 4, [run], [plain]) == pytest.approx((6 * 1.5) / (2 * 3.0 + 3 * 2.0))
    del costs._rounds[round_.of(2)]
    assert costs.predicted(BEAM, "model", round_, 4, [run], [plain]) is None


def test_the_longest_of_several_chains() -> None:
    rng = np.random.default_rng(0)
    drawn = 1 + (rng.random((40_000, 8, 7)) < 0.6).cumprod(axis=2).sum(axis=2)  # chains of 1 to 8
    assert round_costs.longest_of(1, 2.0, 8) == pytest.approx(2.0, abs=1e-6)
    assert round_costs.longest_of(8, drawn.mean(), 8) == pytest.approx(drawn.max(axis=1).mean(), rel=0.01)


class Simulated:
    """A device and what is measured on it, all by its clock."""

    def __init__(self, seconds: Seconds) -> None:
        self.backend = backend = FarDrafts(seconds, likeness=0.97, vocab_size=VOCAB, context_len=CONTEXT_LEN)
        cost, draft_cost = (
            CostTable((1, 64), (first, first + 63 * row), (0.0, 0.0), trip=seconds.trip)
            for first, row in ((seconds.target, seconds.row), (seconds.draft, seconds.row / 2))
        )

        def fresh_engine(drafters: dict[str, Drafter], max_running: int) -> Engine:
            config = EngineConfig(num_slots=8 * CONTEXT_LEN, max_running=max_running, depth=2)
            return Engine(
                backend, family=FarDrafts.shapes, drafters=drafters, cost=cost, config=config, clock=self.clock
            )

        llm = SimpleNamespace(
            backend=backend, tokenizer=SimpleNamespace(eos_ids=(EOS,)), skip_menu=lambda: None,
            calibration=SimpleNamespace(cost=cost, draft_cost=draft_cost), fresh_engine=fresh_engine,
        )  # fmt: skip
        self.drafts = drafting.forced_drafts(llm)  # type: ignore[arg-type]
        rounds = [found for arm in ARMS if (found := round_costs.round_of(arm, self.drafts, 1)) is not None]
        self.costs = round_costs.Costs(
            backend, self.drafts, seconds=0.1, most_rows=32, rounds=rounds, clock=self.clock
        )  # fmt: skip
        self.stage = drafting.Stage(llm, max_running=4, clock=self.clock)  # type: ignore[arg-type]

    def clock(self) -> float:
        return self.backend.now

    def errors(self, prompts: list[list[int]]) -> tuple[dict[str, float], dict[str, float]]:
        """By arm, of what is predicted of these answers one by one; and of tokens a pass by a round's cost."""
        params = SamplingParams(max_tokens=128, temperature=0.7, seed=1)
        taken = speculation.Rounds(self.stage, ARMS, [[p] for p in prompts], params)
        taken.go()
        cells = speculation.arm_cells(ARMS, taken.runs)
        speculation.add_predictions(cells, ARMS, taken.runs, self.costs, self.drafts, 1)
        by_rounds = {}
        for arm in ARMS[1:]:
            round_, runs = round_costs.round_of(arm, self.drafts, 1), taken.runs[arm.name][-1]
            assert round_ is not None
            seconds = np.mean([self.costs._round_seconds(round_, run) for run in runs])
            by_rounds[arm.name] = cells[arm.name]["per_pass"][0] * self.costs._rounds[1].short / seconds
        measured = {arm.name: cells[arm.name]["speed_up"][0] for arm in ARMS[1:]}
        return tuple(  # type: ignore[return-value]
            {name: found[name] / measured[name] - 1 for name in measured}
            for found in ({name: cells[name]["predicted"] for name in measured}, by_rounds)
        )


def prompts() -> dict[str, list[list[int]]]:
    """With answers of 9 to 19 tokens, and of 79 to 109; contexts have 21 to 640."""
    rng = np.random.default_rng(0)
    made = [rng.integers(4, VOCAB, int(n)).tolist() for n in rng.integers(20, 700, 40)]
    return {"short": [made[i] for i in (5, 9, 16, 23)], "long": [made[i] for i in (1, 4, 11)]}


@pytest.mark.slow
def test_predictions_of_whole_answers_come_true() -> None:
    """Of long answers and of short ones, which bursts outlast, and in which trips are a large part. The control, tokens
    a pass by what a round takes, knows neither."""
    near, far = Simulated(Seconds()), Simulated(Seconds(target=0.5e-3, draft=0.2e-3, idle=0.4e-3, trip=0.6e-3))
    for simulated in (near, far):
        found = {kind: simulated.errors(chosen) for kind, chosen in prompts().items()}
        assert all(abs(error) < 0.04 for predicted, _ in found.values() for error in predicted.values()), found
    worst = {kind: max(map(abs, by_rounds.values())) for kind, (_, by_rounds) in found.items()}
    assert all(error > 0.1 for error in worst.values()), worst


def test_predictions_do_not_depend_on_what_the_arm_took() -> None:
    round_ = round_costs.round_of(BEAM, {"model": drafting.Drafts(View(), 1, 4)}, 1)
    costs, plain = made_up_costs({1: flat(1.0), round_: flat(2.0)}), run_of(7.0, 6, (6, 6))
    found = {costs.predicted(BEAM, "model", round_, 1, [run_of(s, 2, (6, 2))], [plain]) for s in (1.0, 50.0)}
    assert len(found) == 1
