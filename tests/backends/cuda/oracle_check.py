"""The equality oracle on a GPU with a real model: every prompt alone, in crowds, in bursts and flights of any depth,
with every drafter, after preemption and from a warm cache gives the same tokens and log-probabilities; and what each
way is there for did happen: preemptions, tokens from the cache, drafts that were accepted and drafts that were not.

python -m tests.backends.cuda.oracle_check MODEL.gguf PROMPTS.jsonl [TOKENS [PROMPTS]]; prompts are lines with `turns`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.skipping import CHEAP, menu_of
from verispec.backends.cost import CostTable
from verispec.backends.protocol import View
from verispec.engine import Engine, Request
from verispec.llm import LLM
from verispec.spec.drafter import Drafter
from verispec.spec.registry import DraftSetup, make_drafters
from verispec.spec.speculation import AUTO, Speculation
from verispec.types import SampleOutput, SamplingParams

SEEDS = (1, 2)
MAX_PROMPT = 1024
ALONE = {"max_running": 1, "depth": 1, "max_burst": 1, "prefix_cache": False}
SHORT_OF_SLOTS = 64 * 200
EVERY = 4  # of the prompts, where few run at once
DRAFTERS = ("suffix", "lookup", AUTO)


class Way(NamedTuple):
    """How requests run: sizes of the engine, who drafts, and which counters must not be 0 at the end.

    `forced` drafters draft whatever that promises; those of the LLM do where it pays, by `cost` or else by what was
    measured here. Requests run `times` times in one engine, and the last run is counted.
    """

    sizes: Mapping[str, Any]
    method: str = "none"
    tree: str | None = None
    forced: bool = False
    times: int = 1
    needs: tuple[str, ...] = ()
    cost: CostTable | None = None

    @property
    def speculation(self) -> Speculation:
        return Speculation.of(self.method, tree=self.tree)


def crowds(short_of_slots: int) -> dict[str, Way]:
    """Without drafts; so few slots are too few for those that run."""
    many = {"max_running": 256, "depth": 1, "prefix_cache": False}
    short = {"max_running": 64, "depth": 2, "max_burst": 7, "num_slots": short_of_slots}
    twice = {"max_running": 40, "depth": 2, "max_burst": 3}
    return {
        "in a batch": Way({**many, "max_burst": 1}),
        "bursts of 16": Way({**many, "max_burst": 16}),
        "bursts of 5": Way({**many, "max_burst": 5}),
        "two flights, 480 at once": Way({"max_running": 480, "depth": 2, "max_burst": 16, "prefix_cache": False}),
        "two flights, bursts of 3, from a warm cache": Way(twice, times=2, needs=("cached",)),
        "after preemption": Way(short, needs=("preempted",)),
        "prompts of 96 rows a pass": Way({"max_running": 33, "depth": 2, "row_budget": 96}),
    }


def drafts(most: int, *needs: str, cost: CostTable | None = None) -> dict[str, Way]:
    """Of drafters that need nothing but the model, with so many at once. Every size is canonical on a GPU, so that
    `decode` would never draft: its engine is told that only passes of 256 rows are."""
    few = {"max_running": most, "depth": 2}
    found = {f"drafts of {method}, {most} at once": Way(few, method, needs=needs, cost=cost) for method in DRAFTERS}
    needs = tuple(counter for counter in needs if counter != "rejected")  # its passes have the bits of the others
    decode = Way({**few, "family": (256,)}, "decode", needs=needs, cost=cost)
    return found | {f"drafts of decode, {most} at once": decode}


def forced_drafts(most: int, method: str, trees: Sequence[str | None], *needs: str) -> dict[str, Way]:
    """With so many at once."""
    return {
        f"forced drafts of {method}{f' {tree}' if tree else ''}, {most} at once": Way(
            {"max_running": most, "depth": 2}, method, tree, forced=True, needs=needs
        )
        for tree in trees
    }


def requests_of(llm: LLM, prompts: Path, num_tokens: int, count: int) -> dict[int, Request]:
    """By number; with each temperature all prompts, with each seed."""
    lines = [json.loads(line) for line in prompts.read_text().splitlines()][:count]
    texts = [llm.chat_ids([{"role": "user", "content": line["turns"][0]}])[-MAX_PROMPT:] for line in lines]
    found = [
        Request(
            ids, SamplingParams(temperature=temperature, max_tokens=num_tokens, seed=100 * i + seed), is_streamed=False,
            eos_ids=llm.tokenizer.eos_ids,
        )
        for temperature in (0.0, 1.0)
        for seed in SEEDS
        for i, ids in enumerate(texts)
    ]  # fmt: skip
    return dict(enumerate(found))


def some_of(requests: Mapping[int, Request], every: int) -> dict[int, Request]:
    """Every so many prompts, at both temperatures, with the first seed."""
    return {i: r for i, r in requests.items() if (r.params.seed or 0) % (100 * every) == SEEDS[0]}


def outputs(engine: Engine, requests: Mapping[int, Request], speculation: Speculation) -> dict[int, SampleOutput]:
    """What each request gave, by its number."""
    ids = {engine.add(replace(r, speculation=speculation)): i for i, r in requests.items()}
    done: dict[int, SampleOutput] = {}
    while engine.has_work:
        for event in engine.step():
            if event.output is not None:
                done[ids[event.request_id]] = event.output
    engine.check()
    return done


def forced_drafters(llm: LLM) -> dict[str, Drafter]:
    """`skip`, `model` and `decode` on cheaper weights draft always; what is skipped is every fifth layer in between."""
    skipped = range(5, llm.architecture.num_layers - 1, 5)
    menu = menu_of(View.without(skipped, skipped))
    setup = DraftSetup(
        backend=llm.backend, cost=llm.calibration.cost, find_menu=lambda: menu, draft_cost=llm.calibration.draft_cost,
        force=True,
    )  # fmt: skip
    return make_drafters(setup)


@contextmanager
def costing(llm: LLM, cost: CostTable | None) -> Iterator[None]:
    """Engines that are made inside believe that passes take so long, whatever the host's time does."""
    measured = llm.calibration
    llm.calibration = measured if cost is None else replace(measured, cost=cost)
    try:
        yield
    finally:
        llm.calibration = measured


def compare_forced(
    llm: LLM, method: str, trees: Sequence[str | None], requests: Mapping[int, Request], every: int,
    reference: Mapping[int, SampleOutput],
) -> list[str]:  # fmt: skip
    """All prompts thirty-two at once, and some of them two at once: passes of few rows alone run on weights of fewer
    bits, and only they need reject something."""
    failed = compare(llm, forced_drafts(32, method, trees, "accepted"), some_of(requests, 1), reference)
    few = forced_drafts(2, method, trees, "accepted", "rejected")
    return failed + compare(llm, few, some_of(requests, every), reference)


def counted(found: Mapping[int, SampleOutput], method: str) -> dict[str, int]:
    """What happened to all of them. Accepted is what this drafter drafted."""
    stats = [output.stats for output in found.values()]
    return {
        "tokens": sum(len(output.token_ids) for output in found.values()),
        "preempted": sum(s.preemptions for s in stats),
        "cached": sum(s.cached_tokens for s in stats),
        "accepted": sum(s.accepted if method == AUTO else s.accepted_by[method] for s in stats),
        "rejected": sum(s.drafted - s.accepted for s in stats),
    }


def compare(
    llm: LLM, ways: Mapping[str, Way], requests: Mapping[int, Request], reference: Mapping[int, SampleOutput]
) -> list[str]:
    """Run the requests in every way, and print what came of it; the names of those that differ from the reference, or
    in which something did not happen that must."""
    failed = []
    for name, way in ways.items():
        begin = time.perf_counter()
        drafters, different = forced_drafters(llm) if way.forced else None, 0
        with costing(llm, way.cost):
            engine = llm.fresh_engine(drafters=drafters, **way.sizes)
        for _ in range(way.times):
            found = outputs(engine, requests, way.speculation)
            different += sum(bool(o.error) or o.digest != reference[i].digest for i, o in found.items())
        counts = counted(found, way.method)
        missing = [counter for counter in way.needs if counts[counter] <= 0]
        if different or missing:
            failed.append(name)
        seconds, told = time.perf_counter() - begin, ", ".join(f"{n} {what}" for what, n in counts.items())
        bad = f"BAD, {' and '.join(missing) or 'bits'}: " if name in failed[-1:] else ""
        print(f"{bad}{name}: {different} of {way.times * len(requests)} differ; {told}; {seconds:.1f} s", flush=True)
    return failed


def other_seeds(llm: LLM, requests: Mapping[int, Request], reference: Mapping[int, SampleOutput]) -> list[str]:
    """The control: with other seeds nearly all that are sampled differ."""
    sampled = {i: _other_seed(r) for i, r in requests.items() if r.params.temperature > 0}
    found = outputs(llm.fresh_engine(), sampled, Speculation.of("none"))
    different = sum(o.digest != reference[i].digest for i, o in found.items())
    print(f"control, other seeds: {different} of {len(sampled)} differ", flush=True)
    return [] if different >= len(sampled) * 19 / 20 else ["control"]


def _other_seed(request: Request) -> Request:
    return replace(request, params=replace(request.params, seed=(request.params.seed or 0) + 77777))


def check(
    model: str, prompts: Path, *, num_tokens: int, count: int, short_of_slots: int = SHORT_OF_SLOTS, every: int = EVERY,
    **options: Any,
) -> list[str]:  # fmt: skip
    """Names of ways that failed. `options` are those of every LLM."""
    begin = time.perf_counter()
    with LLM(model, backend="cuda", drafter="none", **options) as llm:
        print(f"start {time.perf_counter() - begin:.1f} s, profile {llm.profile}", flush=True)
        requests = requests_of(llm, prompts, num_tokens, count)
        longest = max(len(r.prompt_ids) for r in requests.values())
        print(f"{len(requests)} requests with prompts of up to {longest} tokens", flush=True)
        reference = outputs(llm.fresh_engine(**ALONE), requests, Speculation.of("none"))
        print(f"alone: {time.perf_counter() - begin:.1f} s so far", flush=True)
        some = some_of(requests, every)
        failed = compare(llm, crowds(short_of_slots) | drafts(64), requests, reference)
        failed += compare(llm, drafts(2, "accepted", "rejected", cost=CHEAP), some, reference)
        failed += compare_forced(llm, "skip", (None, "branch:2,2"), requests, every, reference)
        failed += other_seeds(llm, requests, reference)
    with LLM(model, backend="cuda", drafter="none", draft_model=model, **options) as llm:
        failed += compare_forced(llm, "model", (None, "beam:3,3", "branch:2,2"), requests, every, reference)
    with LLM(model, backend="cuda", drafter="none", fast_weights="int4", **options) as llm:
        failed += compare_forced(llm, "decode", (None,), requests, every, reference)
    return failed


def main() -> None:
    num_tokens = int(sys.argv[3]) if len(sys.argv) > 3 else 64
    count = int(sys.argv[4]) if len(sys.argv) > 4 else 240
    begin = time.perf_counter()
    failed = check(sys.argv[1], Path(sys.argv[2]), num_tokens=num_tokens, count=count)
    print(f"{time.perf_counter() - begin:.0f} s;", "FAILED: " + "; ".join(failed) if failed else "all equal")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
