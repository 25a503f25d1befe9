"""Drafter `skip` against `none`: what skipping gives, what was predicted, where it pays and where it does not.

    python bench/skip.py --data FOLDER [--model smollm2-135m] [--tokens 48] [--pairs 7] [--plot FILE.png]

FOLDER holds spec_bench_even.jsonl and humaneval_even.jsonl. For each task, temperature and batch size three arms run in
turns, over and over: `none`; `skip` as tuned, which may decide not to draft; and `skip` forced to draft. Prompts are in
the cache, so generation alone is timed. Predicted is the ratio of what the passes that ran should have taken by the
profile, plus what the engine takes between passes with `none`; so it is given the acceptance of that very run. Measured
is the wall clock's.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from drafting import Run, Stage, median, read_tasks, spread

from verispec import LLM, SamplingParams
from verispec.backends.blas import cpu_name
from verispec.backends.cost import CostTable
from verispec.backends.protocol import Backend, View
from verispec.spec.drafter import Drafter
from verispec.spec.registry import DRAFTERS, DraftSetup
from verispec.spec.skip_menu import GREEDY, SkipMenu
from verispec.spec.speculation import Speculation
from verispec.tuning import report


@dataclass(frozen=True, slots=True)
class Cell:
    """One line of the table."""

    task: str
    temperature: float
    batch: int
    drafted: float  # of all tokens that `skip` as tuned committed, drafted ones
    tuned: list[float]
    forced: list[float]
    predicted: list[float]
    acceptance: float
    tokens_per_pass: float

    def line(self) -> str:
        return (
            f"| {self.task} | {self.temperature:g} | {self.batch} | {spread(self.tuned)} | {self.drafted:.0%} | "
            f"{spread(self.forced)} | {median(self.predicted):.2f} | {self.acceptance:.2f} | "
            f"{self.tokens_per_pass:.2f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--prompt-len", type=int, default=192)
    parser.add_argument("--mixed", action="store_true", help="one line for all tasks together in batches above 1")
    parser.add_argument("--skipped", type=int, help="sub-layers that the forced arm skips; default: the menu's best")
    parser.add_argument("--draft-len", type=int, help="its drafts; default: the length predicted best")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    llm = LLM(options.model, drafter="skip", kv_slots=16384)
    menu = llm.skip_menu()
    assert menu is not None
    entry = menu.best()
    assert entry is not None
    if options.skipped is not None:
        entry = min(menu.entries, key=lambda e: abs(e.num_skipped - options.skipped))
    draft_len = options.draft_len or menu.profile.best(entry.view, entry.agreement).draft_len
    forced_menu = replace(menu, entries=(entry,))
    print(f"{llm.identity.name} on {cpu_name()}, {platform.machine()}, profile {llm.profile}")
    print(report.table(menu, llm.architecture))
    print(f"forced drafts: at most {draft_len} tokens, {entry.num_skipped} sub-layers skipped")

    def make(backend: Backend) -> dict[str, Drafter]:
        tuned = DraftSetup(backend=backend, cost=llm.calibration.cost, find_menu=lambda: menu)
        forced = DraftSetup(
            backend=backend, cost=llm.calibration.cost, find_menu=lambda: forced_menu, force=True, draft_len=draft_len
        )
        return {"none": DRAFTERS["none"](tuned), "skip": DRAFTERS["skip"](tuned), "forced": DRAFTERS["skip"](forced)}

    def cost_of(view: View, store: int) -> CostTable:
        return menu.profile.cost_of(view)

    stage = Stage(llm, make, max_running=max(options.batch))
    tasks = read_tasks(llm, options.data, count=max(options.batch), max_len=options.prompt_len)
    print("\n| task | T | batch | skip as tuned / none | drafted | forced / none | predicted | accepted | per pass |")
    print("|---|---|---|---|---|---|---|---|---|")
    cells = []
    for cell in measure(stage, tasks, options, cost_of):
        print(cell.line(), flush=True)
        cells.append(cell)
    errors = [abs(median(c.predicted) / median(c.forced) - 1) for c in cells]
    print(f"\npredicted against measured, forced: median error {median(errors):.1%}, largest {max(errors):.1%}")
    worst = min(median(c.tuned) for c in cells)
    print(f"skip as tuned against none: slowest median {worst:.3f}x")
    if options.json:
        plain = [{name: getattr(c, name) for name in Cell.__slots__} for c in cells]
        options.json.write_text(json.dumps(plain, indent=1))
    if options.plot:
        plot(cells, menu, llm.identity.name, options.plot)


def measure(
    stage: Stage, tasks: dict[str, list[list[int]]], options: argparse.Namespace, cost_of: object
) -> Iterator[Cell]:
    """All cells, each as its runs are done."""
    for batch in options.batch:
        chosen = {task: prompts[:batch] for task, prompts in tasks.items()}
        if options.mixed and batch > 1:
            listed = list(tasks.values())
            chosen = {"all": [listed[i % len(listed)][i // len(listed)] for i in range(batch)]}
        for task, prompts in chosen.items():
            stage.warm(prompts)
            for temperature in options.temperature:
                yield one_cell(stage, task, prompts, temperature, options, cost_of)


def one_cell(
    stage: Stage, task: str, prompts: list[list[int]], temperature: float, options: argparse.Namespace, cost_of: object
) -> Cell:
    params = SamplingParams(max_tokens=options.tokens, temperature=temperature, seed=1, ignore_eos=True)
    arms = ("none", "skip", "forced")
    runs: dict[str, list[Run]] = {arm: [] for arm in arms}
    for arm in arms:
        stage.run(prompts, params, speculation=Speculation(arm))  # warm
    for pair in range(options.pairs):
        for arm in arms[pair % 3 :] + arms[: pair % 3]:
            runs[arm].append(stage.run(prompts, params, speculation=Speculation(arm)))
    digests = {tuple(o.digest for o in run.outputs) for listed in runs.values() for run in listed}
    assert len(digests) == 1, "all arms must give the same bits"

    def ratios(arm: str) -> list[float]:
        return [run.rate / none.rate for run, none in zip(runs[arm], runs["none"], strict=True)]

    host = median([run.host_seconds for run in runs["none"]])

    def seconds(run: Run) -> float:
        return run.predicted_seconds(cost_of) + host * len(run.passes)  # type: ignore[arg-type]

    predicted = [seconds(none) / seconds(run) for run, none in zip(runs["forced"], runs["none"], strict=True)]
    last = runs["forced"][-1]
    tuned = runs["skip"][-1]
    return Cell(
        task, temperature, len(prompts), tuned.total("drafted") / tuned.num_tokens, ratios("skip"), ratios("forced"),
        predicted, last.acceptance, last.block_efficiency,
    )  # fmt: skip


def plot(cells: list[Cell], menu: SkipMenu, name: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    entries = [e for e in menu.entries if e.found_by == GREEDY]  # nested: a curve
    skipped = [e.num_skipped for e in entries]
    left.plot(skipped, [e.agreement for e in entries], "o-", label="agreement, greedy")
    left.plot(skipped, [e.sampled_agreement for e in entries], "s-", label="agreement, T = 1")
    left.plot(skipped, [menu.profile.ratios(e.view, 1)[0] for e in entries], "^--", label="draft cost c")
    left.set(xlabel="sub-layers skipped", ylabel="share", ylim=(0, 1.02), title=f"{name}: skip sets")
    left.legend()
    for batch in sorted({c.batch for c in cells}):
        chosen = [c for c in cells if c.batch == batch]
        right.scatter([median(c.predicted) for c in chosen], [median(c.forced) for c in chosen], label=f"batch {batch}")
    low = min(min(median(c.predicted), median(c.forced)) for c in cells) * 0.9
    high = max(1.1, max(max(median(c.predicted), median(c.forced)) for c in cells) * 1.05)
    right.plot([low, high], [low, high], color="grey", linewidth=1)
    right.axhline(1, color="grey", linewidth=0.6, linestyle=":")
    right.set(xlabel="predicted speed-up", ylabel="measured speed-up", title="forced to draft, against none")
    right.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
