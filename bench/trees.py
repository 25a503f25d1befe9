"""Draft trees: tokens per target pass at fixed draft length and at fixed target budget, and tokens a second.

    python bench/trees.py --data FOLDER --model TARGET [--draft-model DRAFT] [--prompts 24] [--tokens 48]
                          [--parts length budget temperature speed] [--plot FILE.png] [--json FILE]

Without a draft model the target drafts for itself with sub-layers skipped. Arms: chains under `rejection` (SD),
constant branching and stochastic beams under `recursive` (RSD-C, RSD-S), one-hot top-k trees, and shared-noise chains,
trees and beams under `match`. All drafts are forced and of full size. Intervals are 95 % over prompts, by bootstrap.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from drafting import Run, Stage, median, read_tasks, spread

from verispec import LLM, SamplingParams
from verispec.backends.blas import cpu_name
from verispec.backends.protocol import FULL_VIEW, Backend, NoisyTopK, Pass, ReadyTicket, Ticket, TopKWanted
from verispec.spec.drafter import Drafter, Refusal
from verispec.spec.model_drafter import ModelDrafterConfig
from verispec.spec.registry import DRAFTERS, DraftSetup
from verispec.spec.skip import skip_drafter
from verispec.spec.speculation import AUTO, Speculation
from verispec.spec.tree import TreeShape
from verispec.spec.turn import SequenceView
from verispec.types import Accept

BRANCH_OF_LENGTH = {2: "branch:2,2", 3: "branch:2,2,2", 4: "branch:2,2,2,1", 5: "branch:2,2,2,1,1"}
BRANCH_OF_BUDGET = {6: "branch:2,2", 10: "branch:2,2,1", 14: "branch:2,2,2", 21: "branch:3,2,2", 30: "branch:2,2,2,1,1"}
BEAM_OF_BUDGET = {6: "beam:2,3", 10: "beam:2,5", 14: "beam:3,4", 21: "beam:4,5", 30: "beam:5,6"}
BEAM_WIDTH = 4
ALONE = 4  # prompts that are timed one after the other for a batch of 1
TIMED = ("chain:1", "chain:2", "chain:4", "branch:2", "branch:2,1", "beam:2,3", "beam:3,4")


@dataclass(frozen=True, slots=True)
class Arm:
    """A way of drafting and judging."""

    name: str
    tree: str
    accept: Accept = Accept.MATCH
    drafter: str = "drafted"

    def request(self) -> dict[str, Any]:
        return {"speculation": Speculation(self.drafter, TreeShape.parse(self.tree), self.accept)}


def arms_of(chain: str, branch: str, beam: str) -> list[Arm]:
    return [
        Arm("SD", chain, Accept.REJECTION),
        Arm("RSD-C", branch, Accept.RECURSIVE),
        Arm("RSD-S", beam, Accept.RECURSIVE),
        Arm("one-hot top-k", branch, drafter="one-hot"),
        Arm("match chain", chain),
        Arm("match branch", branch),
        Arm("match beam", beam),
    ]


@dataclass(slots=True)
class OneHot:
    """A backend whose draft passes rank children by their logits alone: no noise, whatever the temperature."""

    backend: Backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def submit(self, pass_: Pass) -> Ticket:
        asked = pass_.wanted.noisy_top_k
        if asked is not None and (pass_.store or pass_.view != FULL_VIEW):
            wanted = replace(pass_.wanted, noisy_top_k=None, top_k=TopKWanted(asked.rows, asked.k))
            result = self.backend.submit(replace(pass_, wanted=wanted)).result()
            assert result.top_k is not None
            ranked = NoisyTopK(*result.top_k, result.top_k.values)
            return ReadyTicket(replace(result, top_k=None, noisy_top_k=ranked))
        return self.backend.submit(pass_)


@dataclass(slots=True)
class OnlyByName:
    """Refuses `auto`, which would not have this drafter outside the benchmark."""

    drafter: Drafter

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def state(self, sequence: SequenceView) -> Hashable:
        return Refusal("not for auto") if sequence.speculation.method == AUTO else self.drafter.state(sequence)


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Tokens per target pass, with its interval; how many nodes a round drafted."""

    mean: float
    low: float
    high: float
    nodes: float

    @classmethod
    def of(cls, run: Run) -> Efficiency:
        tokens = np.array([len(o.token_ids) for o in run.outputs], float)
        passes = np.array([o.stats.passes + o.stats.fast_passes for o in run.outputs], float)
        picks = np.random.default_rng(0).integers(0, len(tokens), (4000, len(tokens)))
        drawn = tokens[picks].sum(axis=1) / passes[picks].sum(axis=1)
        low, high = np.quantile(drawn, [0.025, 0.975])
        return cls(tokens.sum() / passes.sum(), float(low), float(high), run.total("drafted") / passes.sum())

    def __str__(self) -> str:
        return f"{self.mean:.2f} ({self.low:.2f}-{self.high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft-model")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--batch", type=int, default=4, help="sequences at once; all their nodes fit into one pass")
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2, 3, 4, 5])
    parser.add_argument("--budgets", type=int, nargs="+", default=[6, 10, 14, 21, 30])
    parser.add_argument("--parts", nargs="+", default=["length", "budget", "temperature", "speed"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--timed", type=int, nargs="+", default=[1, 8], help="batch sizes of the part speed")
    parser.add_argument("--skipped", type=int, default=15, help="sub-layers skipped, where the model drafts for itself")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    llm = LLM(
        options.model, drafter="skip" if options.draft_model is None else "model", draft_model=options.draft_model,
        kv_slots=16384,
    )  # fmt: skip
    what = "skip" if options.draft_model is None else "model"
    name = f"{llm.identity.name} with {Path(options.draft_model).name if options.draft_model else 'sub-layers skipped'}"
    print(f"{name}, {cpu_name()}, {platform.machine()}, {options.prompts} prompts x {options.tokens} tokens")
    tasks = list(read_tasks(llm, options.data, count=-(-options.prompts // 7), max_len=options.prompt_len).values())
    prompts = [tasks[i % len(tasks)][i // len(tasks)] for i in range(options.prompts)]

    menu = llm.skip_menu()
    if what == "skip":
        assert menu is not None
        entry = min(menu.entries, key=lambda e: abs(e.num_skipped - options.skipped))
        menu = replace(menu, entries=(entry,))
        print(f"{entry.num_skipped} sub-layers skipped, agreement {entry.agreement:.2f}, {entry.sampled_agreement:.2f}")

    def make(backend: Backend) -> dict[str, Drafter]:
        def forced(backend: Backend) -> Drafter:
            if what == "skip":  # without its exit: drafts of full length
                return skip_drafter(backend, lambda: menu, ModelDrafterConfig(max_draft=30, force=True))
            return DRAFTERS[what](DraftSetup(backend=backend, draft_cost=llm.calibration.draft_cost, force=True))

        plain = DraftSetup(backend=backend, find_menu=llm.skip_menu, draft_cost=llm.calibration.draft_cost)
        return {
            "none": DRAFTERS["none"](plain), "tuned": DRAFTERS[what](plain), "suffix": DRAFTERS["suffix"](plain),
            "drafted": OnlyByName(forced(backend)),
            "one-hot": OnlyByName(forced(OneHot(backend))),
        }  # fmt: skip

    stage = Stage(llm, make, max_running=options.batch)
    stage.warm(prompts, drafter="drafted", tokens=8)
    bench = Bench(stage, prompts, options)
    results: dict[str, Any] = {}

    def save() -> None:
        if options.json:
            options.json.write_text(json.dumps(results, indent=1))

    if "length" in options.parts:
        grid = {n: arms_of(f"chain:{n}", BRANCH_OF_LENGTH[n], f"beam:{BEAM_WIDTH},{n}") for n in options.lengths}
        results["length"] = bench.table("draft length", grid, 1.0)
        save()
    if "budget" in options.parts:
        grid = {b: arms_of(f"chain:{b}", BRANCH_OF_BUDGET[b], BEAM_OF_BUDGET[b]) for b in options.budgets}
        results["budget"] = bench.table("target budget", grid, 1.0)
        save()
    if "temperature" in options.parts:
        for temperature in (0.0, 0.7):
            grid = {10: arms_of("chain:10", BRANCH_OF_BUDGET[10], BEAM_OF_BUDGET[10])}
            results[f"T={temperature:g}"] = bench.table(f"target budget, T = {temperature:g}", grid, temperature)
            save()
    if "speed" in options.parts:
        results["speed"] = list(speed(stage, prompts, options))
        save()
    if options.plot:
        plot(results, name, options.plot)


@dataclass(slots=True)
class Bench:
    """Block efficiency of arms. Two that draft and judge alike are one: it is measured once."""

    stage: Stage
    prompts: Sequence[Sequence[int]]
    options: argparse.Namespace
    known: dict[tuple[str, Accept, str, float], Efficiency] = field(default_factory=dict)

    def table(self, label: str, grid: dict[int, list[Arm]], temperature: float) -> dict[str, dict[int, list[float]]]:
        """One column per size."""
        found: dict[str, dict[int, Efficiency]] = {}
        print(f"\nTokens per target pass at fixed {label}" + (" (T = 1)" if temperature == 1 else ""))
        for size, arms in grid.items():
            for arm in arms:
                found.setdefault(arm.name, {})[size] = self.efficiency(arm, temperature)
                print(f"  {label} {size}: {arm.name:13} {arm.tree:20} {found[arm.name][size]}", flush=True)
        print(f"\n| {label} | " + " | ".join(map(str, grid)) + " |")
        print("|---|" + "---|" * len(grid))
        for name, sizes in found.items():
            print(f"| {name} | " + " | ".join(map(str, sizes.values())) + " |")
        return {name: {n: [e.mean, e.low, e.high, e.nodes] for n, e in sizes.items()} for name, sizes in found.items()}

    def efficiency(self, arm: Arm, temperature: float) -> Efficiency:
        # At temperature 0 every rule accepts what the target would say itself, and noise plays no part.
        key = (arm.tree, arm.accept, arm.drafter, temperature) if temperature else (arm.tree, Accept.MATCH, "", 0.0)
        if key not in self.known:
            params = SamplingParams(
                max_tokens=self.options.tokens, temperature=temperature, seed=3, ignore_eos=True,
                deterministic=arm.accept is Accept.MATCH,
            )  # fmt: skip
            self.known[key] = Efficiency.of(self.stage.run(self.prompts, params, **arm.request()))
        return self.known[key]


def speed(stage: Stage, prompts: Sequence[Sequence[int]], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Tokens a second against `none`, arms in turns; the same tokens, so the same work."""
    arms: dict[str, dict[str, Any]] = {
        "none": {"speculation": Speculation("none")},
        "as predicted (may not draft)": {"speculation": Speculation("tuned")},
        "auto": {"speculation": Speculation(AUTO)},
        **{tree: Arm("", tree).request() for tree in TIMED},
    }
    print("\n| T | batch | arm | tok/s against none, median (range) | tokens per pass | drafted |")
    print("|---|---|---|---|---|---|")
    for temperature in (0.0, 1.0):
        for batch in options.timed:
            groups = [prompts[:batch]] if batch > 1 else [[prompt] for prompt in prompts[:ALONE]]
            params = SamplingParams(max_tokens=options.tokens, temperature=temperature, seed=3, ignore_eos=True)
            runs: dict[str, list[list[Run]]] = {name: [] for name in arms}  # a round: one run per group
            order = np.random.default_rng(0)
            for _ in range(options.repeats):  # nobody always comes first, or behind the same other
                for name in order.permutation([*arms]).tolist():
                    runs[name].append([stage.run(group, params, **arms[name]) for group in groups])
            digests = {
                tuple(o.digest for run in round_ for o in run.outputs) for each in runs.values() for round_ in each
            }
            assert len(digests) == 1, "all arms must give the same bits"
            for name, rounds in runs.items():
                ratios = [seconds(none) / seconds(own) for own, none in zip(rounds, runs["none"], strict=True)]
                last = rounds[-1]
                tokens = sum(run.num_tokens for run in last)
                per_pass = tokens / sum(run.num_tokens / run.block_efficiency for run in last)
                drafted = sum(run.total("drafted") for run in last) / tokens
                print(
                    f"| {temperature:g} | {batch} | {name} | {spread(ratios)} | {per_pass:.2f} | {drafted:.0%} |",
                    flush=True,
                )
                yield {"T": temperature, "batch": batch, "arm": name, "ratio": median(ratios)}


def seconds(runs: Sequence[Run]) -> float:
    return sum(run.seconds for run in runs)


def plot(results: dict[str, Any], name: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    parts = [part for part in ("length", "budget") if part in results]
    figure, axes = plt.subplots(1, len(parts), figsize=(5.5 * len(parts), 4.6), layout="constrained", squeeze=False)
    labels = {"length": "draft length", "budget": "target budget, nodes"}
    for axis, part in zip(axes[0], parts, strict=True):
        for arm, sizes in results[part].items():
            x = [int(n) for n in sizes]
            mean, low, high = (np.array([values[i] for values in sizes.values()]) for i in range(3))
            style = "--" if arm.startswith("match") else (":" if arm.startswith("one") else "-")
            axis.errorbar(x, mean, yerr=[mean - low, high - mean], label=arm, marker="o", capsize=2, linestyle=style)
        axis.set(xlabel=labels[part], ylabel="tokens per target pass", title=f"fixed {labels[part]}", xticks=x)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.suptitle(f"{name}, T = 1", fontsize=10)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
