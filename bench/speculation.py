"""What speculation gives: every system against drafter `none`, by task, tree, share and batch. One file of results.

    python bench/speculation.py --json FILE --prompts FILE.jsonl ... [--parts tasks trees replay recomputed auto]
                                [--model TARGET] [--draft-model DRAFT] [--backend NAME] [--seconds 60]

Parts: *tasks*: each drafter by task, one stream and batches, T = 0 and 1 (`skip` is draft and verify, `decode` is
decode-verify-rollback, `n-grams` is what `ngram` was); *trees*: recursive speculative decoding, tokens a pass and
tokens a second at fixed draft lengths and target budgets; *replay*: shares of deterministic requests, all there from
the start and arriving as in a --trace; *recomputed*: what `decode` accepts and recomputes, by N (with --backend numpy
also for fast passes that are rounded to bf16, or run on weights of 8 and 4 bits); *auto*: the policy's choice against
every fixed one, by batch; the best of these is chosen on half of the rounds and compared on the others, both ways.

Arms take turns. The tokens and log-probabilities of every arm are compared with those of `none`, and the run fails if
any differs. (SD, RSD-C and RSD-S judge by probabilities, so theirs are others, equally distributed.) A part takes about
--seconds: every cell is measured once, then every cell once more, up to --rounds times, and written each time; cells
that the file has are not measured again, so the same command goes on where it was cut off. `--tables` prints what the
file has, and measures nothing. Intervals are of 95 %, by bootstrap. In brackets stands what is predicted of the same
speed-up by E / (N c + v): on a GPU of whole answers, from rounds that are timed by themselves, the arm's passes and
lengths of drafts, and what `none` took beyond its own rounds; never from what the arm took.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from drafting import (
    EDITS,
    MOST_TRIES,
    NONE,
    Arm,
    Drafts,
    Prompts,
    Run,
    Stage,
    against_best,
    block_efficiency,
    compared_efficiency,
    forced_drafts,
    speed_up,
)
from replays import SIMULATED, recomputed_part, replay_part
from round_costs import Costs, round_of, sizes_up_to
from tables import COMPARED, tables

from verispec import LLM, SamplingParams
from verispec.backends.blas import cpu_name
from verispec.backends.protocol import View
from verispec.backends.select import uses_gpu
from verispec.spec.skip_menu import MenuEntry, SkipMenu
from verispec.spec.tree import TreeShape
from verispec.tuning.profile import measure_profile
from verispec.types import Accept

BRANCH_OF_LENGTH = {2: "branch:2,2", 3: "branch:2,2,2", 4: "branch:2,2,2,1", 5: "branch:2,2,2,1,1"}
# With three children at the root: as deep as the budget allows, because a tree of few levels commits few tokens.
BRANCH_OF_BUDGET = {
    6: "branch:2,2", 10: "branch:2,2,1", 14: "branch:2,2,2", 21: "branch:3,1,1,1,1,1,1",
    30: "branch:3,1,1,1,1,1,1,1,1,1",
}  # fmt: skip
BEAM_OF_BUDGET = {6: "beam:2,3", 10: "beam:2,5", 14: "beam:3,4", 21: "beam:4,5", 30: "beam:5,6"}
BEAM_WIDTH = 4
MOST_ROWS = 64  # of the passes that are timed
MOST_AT_ONCE = 8  # of the part tasks
GROUPS = 4  # of the part auto, at most, where requests run together
BLOCK_TOKENS = 48  # of the answers that block efficiency is measured with
FIRST_TOKENS = 16  # enough for a draft model to have read the prompt
Cell = dict[str, Any]


class Results:
    """The file of all cells, written behind each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"about": {}, "cells": {}}

    def __contains__(self, key: str) -> bool:
        return key in self.data["cells"]

    def add(self, key: str, cell: Cell) -> None:
        self.data["cells"][key] = cell
        self.save()

    def save(self) -> None:
        """Whole, or not at all."""
        written = self._path.with_name(f"{self._path.name}.new")
        written.write_text(json.dumps(self.data, indent=1) + "\n")
        written.replace(self._path)


class Bench:
    """A model, its prompts, and what was measured so far."""

    def __init__(self, options: argparse.Namespace, results: Results) -> None:
        self.options, self.results = options, results
        tunes = "skip" in options.drafters and options.menu is None and {"tasks", "auto", "trees"} & set(options.parts)
        on_gpu = options.backend is not None and uses_gpu(options.backend)
        self.llm = LLM(
            options.model, draft_model=options.draft_model, backend=options.backend,
            drafter="skip" if tunes else "none", kv_slots=options.kv_slots or (None if on_gpu else 16384),
            max_running=max(32, *options.batch), **options.load,
        )  # fmt: skip
        if options.menu is not None:
            self.llm._menu = carried_menu(self.llm, options.menu)
        self.name = self.llm.identity.name
        self.prompts = Prompts(self.llm, options.prompts, max_len=options.prompt_len)
        self.end = math.inf  # of the part that is measured
        results.data["about"].setdefault(self.name, {}).update(self._about())

    def _about(self) -> dict[str, str]:
        llm, options = self.llm, self.options
        return {
            "hardware": llm.backend.device().get("gpu", f"{os.cpu_count()} cores of {cpu_name()}"),
            "backend": options.backend or type(llm.backend).__name__,
            "draft model": Path(options.draft_model).name if options.draft_model else "",
            "fast weights": options.fast_weights or "",
            "profile": llm.profile,
            "python": platform.python_version(),
            "work": f"{options.tokens} tokens, prompts of at most {options.prompt_len}, {options.seconds:g} s a part",
        }

    def turns(self, part: str, wanted: Mapping[str, Any], most: int | None = None) -> Iterator[tuple[str, Any, int]]:
        """What is not measured yet, by key and turn: everything once, then everything again, until the time is over."""
        left = {f"{part} | {self.name} | {what}": value for what, value in wanted.items()}
        left = {key: value for key, value in left.items() if key not in self.results}
        took = dict.fromkeys(left, 0.0)
        for turn in range(1, 1 + (most or self.options.rounds)):
            for i, (key, value) in enumerate(left.items()):
                start = time.perf_counter()
                if (turn > 1 or i) and start + took[key] >= self.end:
                    if turn == 1:
                        print(f"{part}: {len(left) - i} cells are left for another time", flush=True)
                    return
                yield key, value, turn
                took[key] = time.perf_counter() - start
                print(f"  {turn} | {key}: {took[key]:.1f} s", flush=True)


def carried_menu(llm: LLM, file: Path) -> SkipMenu:
    """The skip sets of a file that `verispec tune` kept elsewhere, with what they cost here."""
    profile = measure_profile(llm.backend, llm.architecture.num_layers, llm.calibration.cost)
    entries = tuple(
        MenuEntry(View.without(e["attention"], e["mlp"]), e["agreement"], e["sampled_agreement"])
        for e in json.loads(file.read_text())["entries"]
    )
    return SkipMenu(profile, entries, "carried", 0)


class Rounds:
    """Runs of every arm by round and group, in turns: nobody always comes first, or behind the same other."""

    def __init__(
        self, stage: Stage, arms: Sequence[Arm], groups: Sequence[Sequence[Sequence[int]]], params: SamplingParams
    ) -> None:
        self.runs: dict[str, list[list[Run]]] = {arm.name: [] for arm in arms}
        self._stage, self._arms, self._groups, self._params = stage, arms, groups, params
        self._order = np.random.default_rng(0)
        self._exact: list[list[str]] = []
        stage.warm([p for group in groups for p in group], arms)

    def go(self) -> None:
        """One more of each; the first of all is `none`. Fails if tokens differ from those of `none`."""
        indexes = self._order.permutation(len(self._arms)).tolist()
        for arm in (self._arms[i] for i in (indexes if self._exact else sorted(indexes, key=bool))):
            runs = self._taken(arm)
            self._exact = self._exact or [run.digests for run in runs]
            if arm.is_match and [run.digests for run in runs] != self._exact:
                at_once = f"T = {self._params.temperature:g}, {len(self._groups[0])} at once"
                raise SystemExit(f"{arm.name} changed the output: {at_once}")
            self.runs[arm.name].append(runs)

    def _taken(self, arm: Arm) -> list[Run]:
        """Its runs; once more where graphs were captured meanwhile."""
        for _ in range(MOST_TRIES):
            num_prepared = self._stage.num_prepared
            self._stage.renew()
            runs = [self._stage.run(group, self._params, arm) for group in self._groups]
            if self._stage.num_prepared == num_prepared:
                break
        return runs


def arm_cells(arms: Sequence[Arm], runs: Mapping[str, list[list[Run]]]) -> dict[str, Cell]:
    """What is kept of each arm."""
    seconds = {name: np.array([[run.seconds for run in row] for row in rows]) for name, rows in runs.items()}
    cells = {}
    for arm in arms:
        last = runs[arm.name][-1]
        cells[arm.name] = {
            "tree": arm.tree or "",
            "tokens_per_second": sum(run.num_tokens for run in last) / float(np.median(seconds[arm.name].sum(axis=1))),
            "per_pass": block_efficiency(last),
            "drafted": sum(run.total("drafted") for run in last) / sum(run.num_tokens for run in last),
            "accepted": sum(run.total("accepted") for run in last) / max(1, sum(run.total("drafted") for run in last)),
            "rounds": sum(run.num_rounds for run in last) / sum(run.num_passes for run in last),  # asked, by used
        }
        if arm.is_match or arm == NONE:
            cells[arm.name]["speed_up"] = speed_up(seconds[NONE.name], seconds[arm.name])
        else:  # other tokens, perhaps fewer of them: speeds are compared, not times
            per_token = np.array([[run.seconds / run.num_tokens for run in row] for row in runs[arm.name]])
            plain = np.array([[run.seconds / run.num_tokens for run in row] for row in runs[NONE.name]])
            cells[arm.name]["speed_up"] = speed_up(plain, per_token)
    return cells


class Spot(NamedTuple):
    """Where a cell of `tasks` and `auto` stands."""

    task: str
    temperature: float
    batch: int

    def __str__(self) -> str:
        return f"{self.task} | {self.temperature:g} | {self.batch}"


def tasks_part(bench: Bench) -> None:
    """Every drafter by task; skip and model also forced to draft, with what was predicted of that."""
    options, drafts = bench.options, wanted_drafts(bench)
    arms = [
        Arm("suffix, own text", "suffix, own text"), Arm("suffix", "suffix"), Arm("lookup", "lookup"),
        Arm("n-grams", "n-grams"),
        Arm("decode", "decode"), *(Arm(name, name) for name in drafts),
        *(Arm(f"{name}, forced", f"{name}, forced") for name in drafts), Arm("auto", "auto"),
    ]  # fmt: skip
    if "model" in drafts:
        arms += [Arm("model, chain", "model, full", "chain:4"), Arm("model, beam", "model, full", "beam:2,3")]
    arms = chosen_arms(options, arms)
    count = max([options.count, *(batch for batch in options.batch if batch <= MOST_AT_ONCE)])
    prompts = {task: bench.prompts.of(task, count) for task in sorted(bench.prompts.texts)}
    if options.files:
        prompts[EDITS] = bench.prompts.edits(options.files, 2 * options.tokens)
    spots = [
        Spot(task, temperature, batch)
        for batch in options.batch for temperature in options.temperature for task in prompts
        if batch <= MOST_AT_ONCE and (batch == 1 or task != EDITS)
    ]  # fmt: skip
    costs = measured_costs(bench, drafts, arms, sorted({spot.batch for spot in spots}))
    stage = Stage(bench.llm, max_running=max(options.batch))
    taken: dict[str, Rounds] = {}
    for key, spot, turn in bench.turns("tasks", {str(spot): spot for spot in spots}):
        if turn == 1:
            chosen = prompts[spot.task]
            groups = [[p] for p in chosen[: options.count if spot.task != EDITS else None]]
            groups = groups if spot.batch == 1 else [chosen[: spot.batch]]
            params = SamplingParams(max_tokens=options.tokens, temperature=spot.temperature, seed=1)
            taken[key] = Rounds(stage, arms, groups, params)
        taken[key].go()
        cells = arm_cells(arms, taken[key].runs)
        add_predictions(cells, arms, taken[key].runs, costs, drafts, spot.batch)
        bench.results.add(key, {"part": "tasks", "model": bench.name, **spot._asdict(), "arms": cells})


def chosen_arms(options: argparse.Namespace, arms: Sequence[Arm]) -> list[Arm]:
    """`none`, and those of the wanted drafters, by name if names are given."""
    found = [arm for arm in arms if arm.drafter.split(",")[0] in options.drafters]
    return [NONE, *(arm for arm in found if options.arms is None or arm.name in options.arms)]


def measured_costs(bench: Bench, drafts: Mapping[str, Drafts], arms: Sequence[Arm], batches: Sequence[int]) -> Costs:
    """What passes and rounds of these arms take; kept in the file."""
    sizes = sorted({size for batch in batches for size in sizes_up_to(batch)})
    rounds = [round_of(arm, drafts, size) for arm in arms for size in sizes]
    costs = Costs(
        bench.llm.backend, drafts, seconds=bench.options.seconds / 20, most_rows=MOST_ROWS,
        rounds=[round_ for round_ in rounds if round_ is not None],
    )  # fmt: skip
    about = bench.results.data["about"][bench.name]
    about["milliseconds by rows"] = costs.table()
    about["milliseconds of rounds"] = {**about.get("milliseconds of rounds", {}), **costs.rounds()}
    return costs


def wanted_drafts(bench: Bench) -> dict[str, Drafts]:
    return {name: d for name, d in forced_drafts(bench.llm).items() if name in bench.options.drafters}


def add_predictions(
    cells: dict[str, Cell], arms: Sequence[Arm], runs: Mapping[str, list[list[Run]]], costs: Costs,
    drafts: Mapping[str, Drafts], batch: int,
) -> None:  # fmt: skip
    """To the arms that drafted with a model, the target's own skipped sub-layers included."""
    plain = [
        replace(rounds[-1], seconds=float(np.median([run.seconds for run in rounds])))
        for rounds in zip(*runs[NONE.name], strict=True)
    ]
    for arm in arms:
        name = arm.drafter.split(",")[0]
        if name in drafts and cells[arm.name]["drafted"]:
            predicted = costs.predicted(arm, name, round_of(arm, drafts, batch), batch, runs[arm.name][-1], plain)
            if predicted is not None:
                cells[arm.name]["predicted"] = predicted


def trees_part(bench: Bench) -> None:
    """Speed over some prompts one by one, then block efficiency over many in batches; all drafts of full size."""
    options, drafts = bench.options, wanted_drafts(bench)
    name = "model" if "model" in drafts else "skip"
    if name not in drafts:
        raise SystemExit("trees: nothing to draft with: give --draft-model, or --drafters with skip")
    full, drafts = f"{name}, full", {name: drafts[name]}
    columns = {f"length {n}": (f"chain:{n}", BRANCH_OF_LENGTH[n], f"beam:{BEAM_WIDTH},{n}") for n in options.lengths}
    columns |= {f"budget {b}": (f"chain:{b}", BRANCH_OF_BUDGET[b], BEAM_OF_BUDGET[b]) for b in options.budgets}
    columns |= {f"{branch}, {beam}": (chain_of(branch, beam), branch, beam) for branch, beam in options.shapes}
    arms = {
        column: chosen_arms(options, [
            Arm("SD", full, chain, Accept.REJECTION), Arm("RSD-C", full, branch, Accept.RECURSIVE),
            Arm("RSD-S", full, beam, Accept.RECURSIVE), Arm("one-hot", f"{name}, one-hot", branch),
            Arm("match chain", full, chain), Arm("match branch", full, branch), Arm("match beam", full, beam),
        ])
        for column, (chain, branch, beam) in columns.items()
    }  # fmt: skip
    prompts = bench.prompts.mixed(options.tree_prompts)
    alone = [[p] for p in prompts[:: max(1, len(prompts) // options.count)][: options.count]]
    costs = measured_costs(bench, drafts, [arm for listed in arms.values() for arm in listed], (1,))
    stage = Stage(bench.llm, max_running=16)
    taken: dict[str, Rounds] = {}
    many: dict[str, dict[str, list[Run]]] = {}
    params = SamplingParams(max_tokens=options.tokens, temperature=1.0, seed=3, ignore_eos=True)
    for key, column, turn in bench.turns("trees", {column: column for column in columns}):
        if turn == 1:
            taken[key] = Rounds(stage, arms[column], alone, params)
        taken[key].go()
        if turn == 2 or options.rounds == 1:
            batch = most_together(arms[column], bench.llm.row_budget)
            many[key] = runs_of_many(stage, arms[column], prompts, params, batch)
        cells = arm_cells(arms[column], taken[key].runs)
        add_predictions(cells, arms[column], taken[key].runs, costs, drafts, 1)
        found = many.get(key, {name: rows[-1] for name, rows in taken[key].runs.items()})
        for arm in arms[column][1:]:
            cells[arm.name]["per_pass"] = block_efficiency(found[arm.name])
            if COMPARED.get(arm.name) in found:
                cells[arm.name]["compared"] = compared_efficiency(found[arm.name], found[COMPARED[arm.name]])
        bench.results.add(key, {"part": "trees", "model": bench.name, "column": column, "arms": cells})


def chain_of(branch: str, beam: str) -> str:
    """As many nodes as the larger of two trees has."""
    return f"chain:{max(TreeShape.parse(tree).num_nodes for tree in (branch, beam))}"


def most_together(arms: Sequence[Arm], row_budget: int) -> int:
    """How many sequences have room for whole trees in a pass, up to 16: others would draft less than was asked."""
    most_rows = 1 + max(TreeShape.parse(arm.tree).num_nodes for arm in arms if arm.tree is not None)
    return max(1, min(16, row_budget // most_rows))


def runs_of_many(
    stage: Stage, arms: Sequence[Arm], prompts: Sequence[Sequence[int]], params: SamplingParams, batch: int
) -> dict[str, list[Run]]:
    """Of every arm but `none`, all prompts in batches. Fails if tokens differ from those of `none`."""
    params = replace(params, max_tokens=min(BLOCK_TOKENS, params.max_tokens or BLOCK_TOKENS))
    batches = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]
    stage.warm(prompts, arms[:2])
    exact = [stage.run(together, params, NONE).digests for together in batches]
    for together in batches:  # whoever is the first to draft from a prompt has more passes than others
        stage.run(together, replace(params, max_tokens=FIRST_TOKENS), arms[1])
    found = {}
    for arm in arms[1:]:
        found[arm.name] = [stage.run(together, params, arm) for together in batches]
        if arm.is_match and [run.digests for run in found[arm.name]] != exact:
            raise SystemExit(f"{arm.name} changed the output: trees in batches")
    return found


def auto_part(bench: Bench) -> None:
    """Every fixed choice and `auto`, by batch: requests of all tasks, all there from the start."""
    options, drafts = bench.options, wanted_drafts(bench)
    arms = [Arm(name, name) for name in ("suffix", "lookup", "n-grams", "decode", *drafts)]
    if "model" in drafts:
        arms += [Arm("model, forced", "model, forced")]
        arms += [Arm(tree, "model, full", tree) for tree in ("chain:2", "chain:4", "beam:2,3")]
    arms = [*chosen_arms(options, arms), Arm("auto", "auto")]
    prompts = bench.prompts.mixed(max(options.count, *options.batch))
    spots = [Spot("all", t, batch) for t in options.temperature for batch in options.batch]
    stage = Stage(bench.llm, max_running=max(options.batch))
    taken: dict[str, Rounds] = {}
    for key, spot, turn in bench.turns("auto", {str(spot): spot for spot in spots}):
        if turn == 1:
            starts = range(0, len(prompts) - spot.batch + 1, spot.batch)
            groups = [prompts[i : i + spot.batch] for i in starts][: options.count if spot.batch == 1 else GROUPS]
            params = SamplingParams(max_tokens=options.tokens, temperature=spot.temperature, seed=1, ignore_eos=True)
            taken[key] = Rounds(stage, arms, groups, params)
        taken[key].go()
        runs = taken[key].runs
        cells = arm_cells(arms, runs)
        bench.results.add(
            key, {"part": "auto", "model": bench.name, **spot._asdict(), **compared_with_best(runs), "arms": cells}
        )


def compared_with_best(runs: Mapping[str, list[list[Run]]]) -> Cell:
    """`auto` against the best fixed choice: that of other rounds, and that of the same ones, which luck has part in."""
    fixed = {name: np.array([[run.seconds for run in row] for row in rows]) for name, rows in runs.items()}
    auto = fixed.pop("auto")
    chosen = against_best(fixed, auto)
    best = min(fixed, key=lambda name: np.median(fixed[name].sum(axis=1)))
    return {
        "chosen": chosen.names, "auto_against_chosen": chosen.speed_up,
        "best": best, "auto_against_best": speed_up(fixed[best], auto),
    }  # fmt: skip


PARTS: dict[str, Callable[[Bench], None]] = {
    "tasks": tasks_part, "trees": trees_part, "replay": replay_part, "recomputed": recomputed_part, "auto": auto_part,
}  # fmt: skip


def two_trees(given: str) -> tuple[str, str]:
    """A shape with constant branching, and a beam."""
    branch, _, beam = given.partition("+")
    for shape in (branch, beam):
        TreeShape.parse(shape)
    return branch, beam


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="results; what it has is not measured again")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft-model")
    parser.add_argument("--backend")
    parser.add_argument("--fast-weights", choices=("int4", "int8", "fp8"), help="those of drafter decode (cuda)")
    parser.add_argument("--prompts", type=Path, nargs="*", default=[], help="JSON lines")
    parser.add_argument("--trace", type=Path, help="CSV of arrival times; default: evenly spaced")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each part")
    parser.add_argument(
        "--drafters", nargs="+", default=["suffix", "lookup", "n-grams", "decode", "skip", "model", "auto"]
    )
    parser.add_argument("--arms", nargs="+", help="of tasks, trees and auto, by their names in tables; default: all")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 128], help="tasks: those up to 8")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--tokens", type=int, default=48, help="new tokens of a request, at most")
    parser.add_argument("--prompt-len", type=int, default=1024, help="prompts are cut to their last so many tokens")
    parser.add_argument("--count", type=int, default=8, help="prompts of a task that run one by one")
    parser.add_argument("--files", type=int, default=3, help="files of the task edits")
    parser.add_argument("--tree-prompts", type=int, default=64, help="prompts of trees, for block efficiency")
    parser.add_argument("--lengths", type=int, nargs="*", choices=BRANCH_OF_LENGTH, default=[*BRANCH_OF_LENGTH])
    parser.add_argument("--budgets", type=int, nargs="*", choices=BEAM_OF_BUDGET, default=[*BEAM_OF_BUDGET])
    parser.add_argument(
        "--shapes",
        nargs="*",
        type=two_trees,
        default=[],
        metavar="BRANCH+BEAM",
        help="further columns of trees, such as branch:3,2,1,1+beam:4,5; with --lengths and --budgets empty, no others",
    )
    parser.add_argument("--requests", type=int, default=64, help="of the parts replay and recomputed")
    parser.add_argument(
        "--decode-rounds", type=int, default=2, help="rounds of replay in which `decode` is forced, which is slow"
    )
    parser.add_argument("--windows", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64], help="N of recomputed")
    parser.add_argument("--simulated", nargs="+", choices=SIMULATED, default=SIMULATED, help="with --backend numpy")
    parser.add_argument("--rounds", type=int, default=7, help="the most rounds of a cell")
    parser.add_argument("--menu", type=Path, help="skip sets that `verispec tune` kept, here or elsewhere")
    parser.add_argument("--kv-slots", type=int)
    parser.add_argument("--tables", action="store_true", help="print what --json has, measure nothing")
    options = parser.parse_args(arguments)
    options.load = {} if options.fast_weights is None else {"fast_weights": options.fast_weights}
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    results = Results(options.json)
    if not options.tables:
        start = time.perf_counter()
        bench = Bench(options, results)
        print(f"{bench.name}: loaded in {time.perf_counter() - start:.1f} s", flush=True)
        for part in options.parts:
            start = time.perf_counter()
            bench.end = start + options.seconds
            PARTS[part](bench)
            print(f"{part}: {time.perf_counter() - start:.1f} s", flush=True)
        results.save()
        bench.llm.close()
    for line in tables(results.data):
        print(line)


if __name__ == "__main__":
    main()
