"""What speculation gives: every system against drafter `none`, by task, tree, share and batch. One file of results.

    python bench/speculation.py --json FILE --prompts FILE.jsonl ... [--parts tasks trees replay recomputed auto]
                                [--model TARGET] [--draft-model DRAFT] [--backend NAME] [--seconds 60]

Parts: *tasks*: each drafter by task, one stream and batches, T = 0 and 1 (`skip` is draft and verify, `decode` is
decode-verify-rollback, `lookup` is what `ngram` was); *trees*: recursive speculative decoding, tokens a pass and
tokens a second at fixed draft lengths and target budgets; *replay*: shares of deterministic requests, all there from
the start and arriving as in a --trace; *recomputed*: what `decode` accepts and recomputes, by N (with --backend numpy
also for fast passes that are rounded to bf16, or run on weights of 8 and 4 bits); *auto*: the policy's choice against
every fixed one, by batch.

Arms take turns. The tokens and log-probabilities of every arm are compared with those of `none`, and the run fails if
any differs. (SD, RSD-C and RSD-S judge by probabilities, so theirs are others, equally distributed.) A part takes about
--seconds, shared out over its cells; cells that the file has are not measured again, so the same command goes on where
it was cut off. `--tables` prints what the file has, and measures nothing. Intervals are of 95 %, by bootstrap.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from drafting import EDITS, NONE, Arm, Costs, Drafts, Prompts, Run, Stage, block_efficiency, forced_drafts, speed_up
from replays import SIMULATED, recomputed_part, replay_part
from tables import tables

from verispec import LLM, SamplingParams
from verispec.backends.blas import cpu_name
from verispec.backends.protocol import View
from verispec.backends.select import uses_gpu
from verispec.spec.skip_menu import MenuEntry, SkipMenu
from verispec.tuning.profile import measure_profile
from verispec.types import Accept

BRANCH_OF_LENGTH = {2: "branch:2,2", 3: "branch:2,2,2", 4: "branch:2,2,2,1", 5: "branch:2,2,2,1,1"}
BRANCH_OF_BUDGET = {6: "branch:2,2", 10: "branch:2,2,1", 14: "branch:2,2,2", 21: "branch:3,2,2", 30: "branch:2,2,2,1,1"}
BEAM_OF_BUDGET = {6: "beam:2,3", 10: "beam:2,5", 14: "beam:3,4", 21: "beam:4,5", 30: "beam:5,6"}
BEAM_WIDTH = 4
MOST_ROWS = 64  # of the passes that are timed
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
        self._path.write_text(json.dumps(self.data, indent=1) + "\n")


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

    def cells(self, part: str, wanted: Mapping[str, Any]) -> Iterator[tuple[str, Any, float]]:
        """What is not measured yet, by key, with the time by which each should end."""
        left = {f"{part} | {self.name} | {what}": value for what, value in wanted.items()}
        left = {key: value for key, value in left.items() if key not in self.results}
        end = time.perf_counter() + self.options.seconds
        for i, (key, value) in enumerate(left.items()):
            now = time.perf_counter()
            if now >= end:
                print(f"{part}: {len(left) - i} cells are left for another time", flush=True)
                return
            yield key, value, now + (end - now) / (len(left) - i)
            print(f"  {key}: {time.perf_counter() - now:.1f} s", flush=True)


def carried_menu(llm: LLM, file: Path) -> SkipMenu:
    """The skip sets of a file that `verispec tune` kept elsewhere, with what they cost here."""
    profile = measure_profile(llm.backend, llm.architecture.num_layers, llm.calibration.cost)
    entries = tuple(
        MenuEntry(View.without(e["attention"], e["mlp"]), e["agreement"], e["sampled_agreement"])
        for e in json.loads(file.read_text())["entries"]
    )
    return SkipMenu(profile, entries, "carried", 0)


def measured(
    stage: Stage, arms: Sequence[Arm], groups: Sequence[Sequence[Sequence[int]]], params: SamplingParams, *,
    deadline: float, most: int,
) -> dict[str, list[list[Run]]]:  # fmt: skip
    """Runs of every arm by round and group, in turns: nobody always comes first, or behind the same other.

    Where passes are compiled, behind a first round that is not counted. Fails if tokens differ from those of `none`.
    """
    order, found = np.random.default_rng(0), {arm.name: [] for arm in arms}
    exact: list[list[str]] = []
    for turn in range(0 if stage.prepares else 1, 1 + most):
        if turn > 1 and time.perf_counter() >= deadline:
            break
        indexes = order.permutation(len(arms)).tolist()
        for arm in (arms[i] for i in (indexes if exact else sorted(indexes, key=bool))):  # first of all is `none`
            stage.renew()
            runs = [stage.run(group, params, arm) for group in (groups if turn or arm == NONE else groups[:1])]
            exact = exact or [run.digests for run in runs]
            if arm.is_match and [run.digests for run in runs] != exact[: len(runs)]:
                raise SystemExit(f"{arm.name} changed the output: T = {params.temperature:g}, {len(groups[0])} at once")
            if turn:
                found[arm.name].append(runs)
    return found


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
        Arm("decode", "decode"), *(Arm(name, name) for name in drafts),
        *(Arm(f"{name}, forced", f"{name}, forced") for name in drafts), Arm("auto", "auto"),
    ]  # fmt: skip
    if "model" in drafts:
        arms.append(Arm("model, beam", "model, full", "beam:2,3"))
    arms = [NONE, *(arm for arm in arms if arm.name.split(",")[0] in options.drafters)]
    count = max(options.count, *options.batch)
    prompts = {task: bench.prompts.of(task, count) for task in sorted(bench.prompts.texts)}
    prompts[EDITS] = bench.prompts.edits(options.files, 2 * options.tokens)
    spots = [
        Spot(task, temperature, batch)
        for batch in options.batch for task in prompts for temperature in options.temperature
        if batch <= 8 and (batch == 1 or task != EDITS)
    ]  # fmt: skip
    costs = Costs(bench.llm.backend, drafts, seconds=options.seconds / 10, most_rows=MOST_ROWS)
    stage = Stage(bench.llm, max_running=max(options.batch))
    for key, spot, deadline in bench.cells("tasks", {str(spot): spot for spot in spots}):
        chosen = prompts[spot.task]
        groups = [[p] for p in chosen[: options.count if spot.task != EDITS else None]]
        groups = groups if spot.batch == 1 else [chosen[: spot.batch]]
        stage.warm([p for group in groups for p in group], arms)
        params = SamplingParams(max_tokens=options.tokens, temperature=spot.temperature, seed=1)
        runs = measured(stage, arms, groups, params, deadline=deadline, most=options.rounds)
        cells = arm_cells(arms, runs)
        add_predictions(cells, arms, runs, costs, spot.batch)
        bench.results.add(key, {"part": "tasks", "model": bench.name, **spot._asdict(), "arms": cells})


def wanted_drafts(bench: Bench) -> dict[str, Drafts]:
    return {name: d for name, d in forced_drafts(bench.llm).items() if name in bench.options.drafters}


def add_predictions(
    cells: dict[str, Cell], arms: Sequence[Arm], runs: Mapping[str, list[list[Run]]], costs: Costs, batch: int
) -> None:
    """To the arms that drafted with a model, the target's own skipped sub-layers included."""
    for arm in arms:
        name = arm.drafter.split(",")[0]
        if name in ("skip", "model") and cells[arm.name]["drafted"]:
            cells[arm.name]["predicted"] = costs.predicted(arm, name, batch, runs[arm.name][-1])


def trees_part(bench: Bench) -> None:
    """Block efficiency over many prompts in batches, speed over some of them one by one; all drafts of full size."""
    options, drafts = bench.options, wanted_drafts(bench)
    name = "model" if "model" in drafts else "skip"
    if name not in drafts:
        raise SystemExit("trees: nothing to draft with: give --draft-model, or --drafters with skip")
    columns = {f"length {n}": (f"chain:{n}", BRANCH_OF_LENGTH[n], f"beam:{BEAM_WIDTH},{n}") for n in BRANCH_OF_LENGTH}
    columns |= {f"budget {b}": (f"chain:{b}", BRANCH_OF_BUDGET[b], BEAM_OF_BUDGET[b]) for b in BEAM_OF_BUDGET}
    prompts = bench.prompts.mixed(options.tree_prompts)
    costs = Costs(bench.llm.backend, {name: drafts[name]}, seconds=options.seconds / 10, most_rows=MOST_ROWS)
    bench.results.data["about"][bench.name]["milliseconds by rows"] = costs.table()
    stage = Stage(bench.llm, max_running=16)
    for key, (chain, branch, beam), deadline in bench.cells("trees", columns):
        full = f"{name}, full"
        arms = [
            NONE, Arm("SD", full, chain, Accept.REJECTION), Arm("RSD-C", full, branch, Accept.RECURSIVE),
            Arm("RSD-S", full, beam, Accept.RECURSIVE), Arm("one-hot", f"{name}, one-hot", branch),
            Arm("match chain", full, chain), Arm("match branch", full, branch), Arm("match beam", full, beam),
        ]  # fmt: skip
        params = SamplingParams(max_tokens=options.tokens, temperature=1.0, seed=3, ignore_eos=True)
        stage.warm(prompts, arms[:2])
        alone = [[p] for p in prompts[:: max(1, len(prompts) // options.count)][: options.count]]
        runs = measured(stage, arms, alone, params, deadline=deadline, most=options.rounds)
        cells = arm_cells(arms, runs)
        add_predictions(cells, arms, runs, costs, 1)
        batches = [prompts[i : i + 16] for i in range(0, len(prompts), 16)]
        exact = [run.digests for run in (stage.run(batch, params, NONE) for batch in batches)]
        for arm in arms[1:]:
            many = [stage.run(batch, params, arm) for batch in batches]
            if arm.is_match and [run.digests for run in many] != exact:
                raise SystemExit(f"{arm.name} changed the output: trees in batches")
            cells[arm.name]["per_pass"] = block_efficiency(many)
        bench.results.add(key, {"part": "trees", "model": bench.name, "column": key.split(" | ")[-1], "arms": cells})


def auto_part(bench: Bench) -> None:
    """Every fixed choice and `auto`, by batch: requests of all tasks, all there from the start."""
    options, drafts = bench.options, wanted_drafts(bench)
    arms = [Arm("suffix", "suffix"), Arm("decode", "decode"), *(Arm(name, name) for name in drafts)]
    if "model" in drafts:
        arms += [Arm(tree, "model, full", tree) for tree in ("chain:2", "chain:4", "beam:2,3")]
    arms = [NONE, *arms, Arm("auto", "auto")]
    prompts = bench.prompts.mixed(max(options.batch))
    spots = [Spot("all", t, batch) for batch in options.batch for t in options.temperature]
    stage = Stage(bench.llm, max_running=max(options.batch))
    for key, spot, deadline in bench.cells("auto", {str(spot): spot for spot in spots}):
        groups = [prompts[: spot.batch]] if spot.batch > 1 else [[p] for p in prompts[: options.count]]
        stage.warm([p for group in groups for p in group], arms)
        params = SamplingParams(max_tokens=options.tokens, temperature=spot.temperature, seed=1, ignore_eos=True)
        runs = measured(stage, arms, groups, params, deadline=deadline, most=options.rounds)
        cells = arm_cells(arms, runs)
        best = max((a.name for a in arms[:-1]), key=lambda name: cells[name]["tokens_per_second"])
        seconds = [np.array([[run.seconds for run in row] for row in runs[name]]) for name in (best, "auto")]
        against = {"best": best, "auto_against_best": speed_up(*seconds)}
        bench.results.add(key, {"part": "auto", "model": bench.name, **spot._asdict(), **against, "arms": cells})


PARTS: dict[str, Callable[[Bench], None]] = {
    "tasks": tasks_part, "trees": trees_part, "replay": replay_part, "recomputed": recomputed_part, "auto": auto_part,
}  # fmt: skip


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="results; what it has is not measured again")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft-model")
    parser.add_argument("--backend")
    parser.add_argument("--fast-weights", choices=("int4", "int8"), help="those of drafter decode (cuda)")
    parser.add_argument("--prompts", type=Path, nargs="*", default=[], help="JSON lines")
    parser.add_argument("--trace", type=Path, help="CSV of arrival times; default: evenly spaced")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each part")
    parser.add_argument("--drafters", nargs="+", default=["suffix", "lookup", "decode", "skip", "model", "auto"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 128], help="tasks: those up to 8")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--tokens", type=int, default=48, help="new tokens of a request, at most")
    parser.add_argument("--prompt-len", type=int, default=1024, help="prompts are cut to their last so many tokens")
    parser.add_argument("--count", type=int, default=8, help="prompts of a task that run one by one")
    parser.add_argument("--files", type=int, default=3, help="files of the task edits")
    parser.add_argument("--tree-prompts", type=int, default=64, help="prompts of trees, for block efficiency")
    parser.add_argument("--requests", type=int, default=64, help="of the parts replay and recomputed")
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
            PARTS[part](bench)
            print(f"{part}: {time.perf_counter() - start:.1f} s", flush=True)
        results.save()
        bench.llm.close()
    for line in tables(results.data):
        print(line)


if __name__ == "__main__":
    main()
