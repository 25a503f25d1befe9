"""What is said of times, on made-up ones: who is compared with whom, and how tables put it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import drafting
import replays
import speculation
import tables

from verispec.spec.tree import TreeShape
from verispec.types import SequenceStats

FIXED = [f"arm {i}" for i in range(10)]


def made_up(seed: int, faster: float = 1.0, rounds: int = 6) -> dict[str, np.ndarray]:
    """Seconds [rounds, groups] of arms that are equal but for noise of 10 %; the first is so much faster."""
    rng = np.random.default_rng(seed)
    seconds = {name: 1 + 0.1 * rng.standard_normal((rounds, 3)) for name in (*FIXED, "auto")}
    seconds[FIXED[0]] /= faster
    return seconds


def runs_of(seconds: dict[str, np.ndarray]) -> dict[str, list[list[SimpleNamespace]]]:
    return {name: [[SimpleNamespace(seconds=s) for s in row] for row in rows] for name, rows in seconds.items()}


def test_auto_is_as_good_as_its_equals() -> None:
    """Compared on other rounds than those that chose; the luckiest of ten, on its own rounds, is clearly ahead."""
    cells = [speculation.compared_with_best(runs_of(made_up(seed))) for seed in range(40)]
    assert np.mean([cell["auto_against_chosen"].value for cell in cells]) == pytest.approx(1, abs=0.015)
    assert np.mean([cell["auto_against_best"].value for cell in cells]) < 0.97
    inside = [cell["auto_against_chosen"].low <= 1 <= cell["auto_against_chosen"].high for cell in cells]
    assert np.mean(inside) > 0.8


def test_a_fixed_choice_that_is_better_is_seen() -> None:
    cell = speculation.compared_with_best(runs_of(made_up(1, faster=1.5)))
    assert cell["chosen"] == (FIXED[0], FIXED[0])
    assert cell["best"] == FIXED[0]
    assert cell["auto_against_chosen"].value == pytest.approx(1 / 1.5, abs=0.05)
    assert cell["auto_against_chosen"].high < 0.8


def test_rounds_are_compared_with_who_was_best_in_the_others() -> None:
    """`a` is fast in even rounds, `b` in odd ones: neither has its luck counted."""
    fast, slow = np.array([[1.0], [3.0], [1.0], [3.0]]), np.array([[3.0], [1.0], [3.0], [1.0]])
    found = drafting.against_best({"a": fast, "b": slow}, np.ones((4, 1)))
    assert found == (("b", "a"), (3.0, 3.0, 3.0))


def test_a_single_round_judges_itself() -> None:
    found = drafting.against_best({"a": np.array([[2.0]]), "b": np.array([[1.0]])}, np.array([[1.0]]))
    assert found == (("b", "b"), (1.0, 1.0, 1.0))


def test_tables_name_those_that_auto_is_compared_with() -> None:
    plain = {"speed_up": [1.0, 1.0, 1.0], "tokens_per_second": 5.0, "per_pass": [1.0], "accepted": 0.0, "drafted": 0.0}
    spot = {"part": "auto", "model": "m", "task": "all", "temperature": 1.0, "batch": 8, "arms": {"none": plain}}
    new = {"chosen": ["suffix", "decode"], "auto_against_chosen": [0.99, 0.97, 1.01]}
    old = {"best": "suffix", "auto_against_best": [0.95, 0.93, 0.97]}
    said = "\n".join(tables.tables({"about": {"m": {}}, "cells": {"a": spot | new | old, "b": spot | old}}))
    assert "| 0.99 (0.97-1.01), suffix and decode | 0.95 (0.93-0.97), suffix |" in said
    assert "| 5 |  | 0.95 (0.93-0.97), suffix |" in said  # of a file from before


def test_of_two_files_each_arm_is_the_last_that_was_measured() -> None:
    first = {"about": {"m": 1}, "cells": {"a": {"task": "chat", "arms": {"none": 1, "skip": 2}}, "b": {"arms": {}}}}
    second = {"about": {"n": 2}, "cells": {"a": {"task": "chat", "arms": {"none": 3, "auto": 4}}}}
    joined = tables.joined([first, second])
    assert joined["about"] == {"m": 1, "n": 2}
    assert joined["cells"]["a"] == {"task": "chat", "arms": {"none": 3, "skip": 2, "auto": 4}}
    assert joined["cells"].keys() == {"a", "b"}


def test_tables_of_trees_have_intervals_and_count_near_predictions_by_kind() -> None:
    def arm(predicted: float, measured: float) -> dict[str, object]:
        return {"speed_up": [measured, 0.9, 1.5], "per_pass": [2.5, 2.25, 2.75], "predicted": predicted}

    arms = {
        "none": {"speed_up": [1.0, 1.0, 1.0], "per_pass": [1.0, 1.0, 1.0]}, "SD": arm(1.2, 1.0),
        "match chain": arm(1.29, 1.27), "match branch": arm(1.0, 1.05), "match beam": arm(1.0, 1.2),
    }  # fmt: skip
    cell = {"part": "trees", "model": "m", "column": "length 2", "arms": arms}
    said = "\n".join(tables.tables({"about": {"m": {}}, "cells": {"a": cell}}))
    assert "| match chain | 2.50 (2.25-2.75) |" in said
    assert "| match chain | 1.27 (0.90-1.50) [1.29] |" in said
    assert "2 of 4 within 10%: p/q rules 0 of 1, chains 1 of 1, trees 1 of 2." in said


def test_trees_are_compared_prompt_by_prompt() -> None:
    """Prompts differ by far more than the arms do, and the better one is better on nearly every prompt."""
    rng = np.random.default_rng(0)
    passes = rng.integers(8, 40, 64)
    fewer = passes - (rng.random(64) < 0.5)

    def runs(counts: np.ndarray) -> list[drafting.Run]:
        outputs = [SimpleNamespace(token_ids=range(48), stats=SequenceStats(passes=int(n))) for n in counts]
        return [drafting.Run(outputs[:16], 1.0), drafting.Run(outputs[16:], 1.0)]  # type: ignore[arg-type]

    found = drafting.compared_efficiency(runs(fewer), runs(passes))
    assert found.value == pytest.approx(passes.sum() / fewer.sum())
    assert 1.0 < found.low < found.value < found.high < 1.05
    same = drafting.compared_efficiency(runs(passes), runs(passes))
    assert same == (1.0, 1.0, 1.0)
    alone = [drafting.block_efficiency(runs(counts)) for counts in (fewer, passes)]
    assert alone[0].low < alone[1].high  # the control: intervals of each by itself overlap
    mixed = drafting.compared_efficiency(runs(rng.permutation(fewer)), runs(passes))
    assert mixed.low < 1.0 < mixed.high  # and so would pairs of different prompts say nothing


def test_tables_say_how_shared_noise_compares_with_rules_of_probability() -> None:
    arm = {"speed_up": [1.0, 1.0, 1.0], "per_pass": [2.5, 2.25, 2.75]}
    arms = {"none": arm, "RSD-S": arm, "match beam": arm | {"compared": [1.03, 1.01, 1.05]}, "match branch": arm}
    cells = {n: {"part": "trees", "model": "m", "column": f"length {n}", "arms": arms} for n in (2, 3)}
    said = [*tables.tables({"about": {"m": {}}, "cells": cells})]
    shown = "match beam / RSD-S, same prompts (95 %): length 2 1.03 (1.01-1.05), length 3 1.03 (1.01-1.05)."
    assert [line for line in said if "same prompts" in line] == [f"\nTokens a pass, {shown}"]


def test_shapes_of_trees_can_be_asked_for() -> None:
    options = speculation.parsed(["--json", "x", "--budgets", "--lengths", "--shapes", "branch:3,2,1+beam:2,9"])
    assert options.shapes == [("branch:3,2,1", "beam:2,9")]
    assert speculation.chain_of(*options.shapes[0]) == "chain:18"
    with pytest.raises(SystemExit):
        speculation.parsed(["--json", "x", "--shapes", "branch:3,2,1"])


def test_trees_of_a_batch_have_room_for_all_of_their_nodes() -> None:
    arms = [drafting.NONE, *(drafting.Arm("", "model, full", tree) for tree in ("chain:30", "branch:2,2", "beam:5,6"))]
    assert speculation.most_together(arms, 128) == 4  # of 31 rows each
    assert speculation.most_together(arms, 4096) == 16
    assert speculation.most_together(arms, 16) == 1


@pytest.mark.parametrize("budget", speculation.BRANCH_OF_BUDGET)
def test_trees_keep_to_their_budgets(budget: int) -> None:
    branch, beam = (of[budget] for of in (speculation.BRANCH_OF_BUDGET, speculation.BEAM_OF_BUDGET))
    assert max(TreeShape.parse(shape).num_nodes for shape in (branch, beam)) <= budget


def test_tables_of_tasks_count_near_predictions_by_arm() -> None:
    arm = {"speed_up": [1.0, 1.0, 1.0], "tokens_per_second": 5.0, "per_pass": [1.0], "accepted": 0.0, "drafted": 0.0}
    arms = {"none": arm, "skip": arm | {"predicted": 1.05}, "model": arm | {"predicted": 1.2}}
    cell = {"part": "tasks", "model": "m", "task": "qa", "temperature": 1.0, "batch": 1, "arms": arms}
    said = "\n".join(tables.tables({"about": {"m": {}}, "cells": {"a": cell, "b": cell}}))
    assert "2 of 4 within 10%: skip 2 of 2, model 0 of 2." in said


def test_arrivals_are_medians_with_their_range_by_kind_of_request() -> None:
    runs = [{"tokens_per_second": tps, "other latency p50": late} for tps, late in ((90, 1.5), (100, 1.25), (110, 1.0))]
    found = replays.ranges(runs)
    assert found == {"tokens_per_second": [100, 90, 110], "other latency p50": [1.25, 1.0, 1.5]}
    at_once = {"tokens_per_second": 120.0, "speed_up": [1.0, 0.9, 1.1]}
    arms = {"all non-deterministic": at_once | {"arrivals": found}, "from before": at_once}
    cell = {"part": "replay", "model": "m", "share": 0, "arms": arms}
    said = "\n".join(tables.tables({"about": {"m": {}}, "cells": {"a": cell}}))
    assert "| 0 % | all non-deterministic | 120 | 1.00 (0.90-1.10) |  |" in said
    assert "| 0 % | all non-deterministic | 100 (90-110) |  |  | 1.25 (1.00-1.50) |" in said
    assert said.count("from before") == 1


def test_drift_does_not_count_for_or_against_an_arm() -> None:
    """A machine that is 1 % slower with every run; `none` is as fast as nobody deterministic, `auto` takes 5 % more."""
    rng, now, rounds = np.random.default_rng(0), 1.0, []
    for _ in range(12):
        names = ["before", *rng.permutation(["none", "auto"]).tolist(), "after"]
        found = {}
        for name in names:
            now *= 1.01
            found[name] = now * (1.05 if name == "auto" else 1.0)
        rounds.append(replays.ReplayRound(found.pop("before"), {n: found[n] for n in ("none", "auto")}, found["after"]))
    rounds[0].arms["decode"] = 2.5
    cells = replays.replay_cells(rounds, 1000)
    assert cells["none"]["speed_up"].value == pytest.approx(1.0, abs=0.006)
    assert cells["auto"]["speed_up"].value == pytest.approx(1 / 1.05, abs=0.006)
    assert cells["auto"]["speed_up"].high < 0.98
    assert cells[replays.PLAIN]["speed_up"].value == pytest.approx(1 / 1.01**3)  # what a figure may be off
    assert cells["decode"]["rounds"] == 1
    assert cells["decode"]["speed_up"].value == pytest.approx((rounds[0].before + rounds[0].after) / 2 / 2.5)
    at_first = np.median([r.before for r in rounds]) / np.median([r.arms["none"] for r in rounds])
    assert at_first < 0.993  # the control: against whoever always comes first


def test_arms_of_a_round_come_in_any_order_between_two_runs_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """`decode`, which is slow, is in the first rounds alone; runs that capture graphs are made again."""
    seen: list[tuple[int, str]] = []
    backend = SimpleNamespace(_graphs=[])

    def played(bench: object, share: int, drafter: str, times: list[float]) -> tuple[SimpleNamespace, list[object]]:
        seen.append((share, drafter))
        backend._graphs += ["new"] * (len(seen) == 2)
        return SimpleNamespace(seconds=float(len(seen)), outputs=[]), []

    monkeypatch.setattr(replays, "played", played)
    bench = SimpleNamespace(llm=SimpleNamespace(backend=backend), options=SimpleNamespace(requests=1))
    order = np.random.default_rng(0)
    orders = set()
    for turn in range(1, 9):
        seen.clear() if turn > 1 else None
        arms = replays.arms_of(50, with_decode=turn <= 2)
        found = replays.replay_round(bench, 50, arms, order, {})  # type: ignore[arg-type]
        runs = [run for i, run in enumerate(seen) if turn > 1 or i != 1]
        assert runs[0] == runs[-1] == (0, "none")
        assert {drafter for _, drafter in runs[1:-1]} == ({"none", "auto", "decode"} if turn <= 2 else {"none", "auto"})
        assert len(seen) == len(runs) + (turn == 1)
        assert set(found.arms) == {drafter for _, drafter in runs[1:-1]}
        orders.add(tuple(drafter for _, drafter in runs[1:-1]))
    assert len(orders) > 3
    assert replays.arms_of(0, with_decode=True) == [replays.PLAIN]


def test_latencies_are_of_deterministic_requests_and_of_others() -> None:
    def output(seconds: float) -> SimpleNamespace:
        return SimpleNamespace(stats=SimpleNamespace(arrival_time=1.0, finish_time=1.0 + seconds, gaps=[seconds / 4]))

    def request(deterministic: bool) -> SimpleNamespace:
        return SimpleNamespace(params=SimpleNamespace(deterministic=deterministic))

    run = SimpleNamespace(outputs=[output(2.0), output(4.0), output(8.0)])
    found = replays._latencies(run, [request(True), request(False), request(False)])
    assert found == {
        "deterministic latency p50": 2.0, "deterministic latency p99": 2.0, "deterministic gap p50": 0.5,
        "deterministic gap p99": 0.5, "other latency p50": 4.0, "other latency p99": 8.0, "other gap p50": 1.0,
        "other gap p99": 2.0,
    }  # fmt: skip


def test_recomputed_shares_have_intervals_over_requests() -> None:
    def output(num_tokens: int, accepted: int, mismatches: int, recomputed: int) -> SimpleNamespace:
        stats = SequenceStats(replays=4, accepted=accepted, mismatches=mismatches, recomputed=recomputed)
        return SimpleNamespace(token_ids=range(num_tokens), stats=stats)

    found = replays.replayed([output(30, 27, 3, 10), output(30, 30, 0, 0)] * 20)
    assert [found[name] for name in ("committed", "replays", "mismatches", "recomputed")] == [1200, 160, 60, 200]
    share, acceptance = found["recomputed_share"], found["acceptance"]
    assert share.value == pytest.approx(200 / 1400)
    assert acceptance.value == pytest.approx(1140 / 1200)
    assert 0.09 < share.low < 0.12 < 0.16 < share.high < 0.2  # by hand: a standard error of 0.02 at 40 requests
    assert acceptance.low < acceptance.value < acceptance.high < 1
    alike = replays.replayed([output(30, 27, 3, 10)] * 40)["recomputed_share"]
    assert alike.low == alike.value == alike.high == 0.25, "requests that are alike leave no doubt"
    assert replays.replayed([output(30, 0, 0, 0)])["acceptance"] == (0.0, 0.0, 0.0)
    cell = {"part": "recomputed", "model": "m", "kind": "int4", "temperature": 1.0, "N": 4, "tokens_per_second": 9.0}
    before = {"recomputed_share": 0.25, "acceptance": 0.9}
    said = "\n".join(tables.tables({"about": {"m": {}}, "cells": {"a": cell | found, "b": cell | found | before}}))
    assert f"| 200: 14.3% ({share.low:.1%}-{share.high:.1%}) | 0.950 (" in said
    assert "| 200: 25.0% | 0.900 |" in said  # of a file from before


@pytest.mark.parametrize(("count", "num_different"), [(4, 4), (10, 10), (25, 10)])
def test_no_prompt_is_taken_twice_before_all_are_used(count: int, num_different: int) -> None:
    """Or the answer to the first would be drafted from in the others."""
    prompts = drafting.Prompts.__new__(drafting.Prompts)
    prompts.texts = {"task": [str(i) for i in range(10)]}
    prompts._ids = lambda text: [int(text)]  # type: ignore[method-assign]
    found = prompts.of("task", count)
    assert len(found) == count
    assert len({tuple(ids) for ids in found[: min(count, 10)]}) == num_different
