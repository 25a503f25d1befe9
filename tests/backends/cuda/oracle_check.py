"""The equality oracle on a GPU with a real model: every prompt alone, in crowds, in bursts and flights of any depth,
with drafts, after preemption and from a warm cache gives the same tokens and log-probabilities.

python -m tests.backends.cuda.oracle_check MODEL.gguf PROMPTS.jsonl [TOKENS [PROMPTS]]; prompts are lines with `turns`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from verispec.engine import Engine, Request
from verispec.llm import LLM
from verispec.spec.speculation import Speculation
from verispec.types import SampleOutput, SamplingParams

SEEDS = (1, 2)
DRAFTERS = ("suffix", "lookup", "decode", "auto")
MAX_PROMPT = 300


def requests_of(llm: LLM, prompts: Path, num_tokens: int, count: int) -> list[Request]:
    lines = [json.loads(line) for line in prompts.read_text().splitlines()][:count]
    texts = [llm.chat_ids([{"role": "user", "content": line["turns"][0]}])[-MAX_PROMPT:] for line in lines]
    return [
        Request(
            ids, SamplingParams(temperature=temperature, max_tokens=num_tokens, seed=100 * i + seed), is_streamed=False,
            eos_ids=llm.tokenizer.eos_ids,
        )
        for temperature in (0.0, 1.0)
        for seed in SEEDS
        for i, ids in enumerate(texts)
    ]  # fmt: skip


def outputs(engine: Engine, requests: Sequence[Request], method: str) -> dict[int, SampleOutput]:
    """What each request gave, by its place in the list."""
    from dataclasses import replace

    speculation = Speculation.of(method)
    ids = {engine.add(replace(r, speculation=speculation)): i for i, r in enumerate(requests)}
    done: dict[int, SampleOutput] = {}
    while engine.has_work:
        for event in engine.step():
            if event.output is not None:
                done[ids[event.request_id]] = event.output
    engine.check()
    return done


def main() -> None:
    num_tokens = int(sys.argv[3]) if len(sys.argv) > 3 else 64
    count = int(sys.argv[4]) if len(sys.argv) > 4 else 240
    begin = time.perf_counter()
    llm = LLM(sys.argv[1], backend="cuda", drafter="none")
    print(f"start {time.perf_counter() - begin:.1f} s, profile {llm.profile}", flush=True)
    failed = check(llm, Path(sys.argv[2]), num_tokens, count)
    print("FAILED" if failed else "all equal")
    sys.exit(failed)


def check(llm: LLM, prompts: Path, num_tokens: int, count: int) -> bool:
    requests = requests_of(llm, prompts, num_tokens, count)
    many = 256
    ways = {
        "alone": {"max_running": 1, "depth": 1, "max_burst": 1, "prefix_cache": False},
        "in a batch": {"max_running": many, "depth": 1, "max_burst": 1, "prefix_cache": False},
        "bursts of 16": {"max_running": many, "depth": 1, "max_burst": 16, "prefix_cache": False},
        "bursts of 5": {"max_running": many, "depth": 1, "max_burst": 5, "prefix_cache": False},
        "depth 2": {"max_running": 480, "depth": 2, "max_burst": 16, "prefix_cache": False},
        "depth 2, bursts of 3, 40 at once": {"max_running": 40, "depth": 2, "max_burst": 3},
        "after preemption": {"max_running": 64, "depth": 2, "max_burst": 7, "num_slots": 64 * 200},
        "prompts of 96 rows a pass": {"max_running": 33, "depth": 2, "row_budget": 96},
        **{f"drafts of {method}": {"max_running": 64, "depth": 2} for method in DRAFTERS},
    }
    reference: dict[int, SampleOutput] = {}
    failed = False
    for name, changes in ways.items():
        begin = time.perf_counter()
        engine = llm.fresh_engine(**changes)
        found = outputs(engine, requests, name.removeprefix("drafts of ") if name.startswith("drafts") else "none")
        reference = reference or found
        different = sum(found[i].digest != reference[i].digest for i in range(len(requests)))
        tokens = sum(len(o.token_ids) for o in found.values())
        preempted = sum(o.stats.preemptions for o in found.values())
        failed |= different > 0 or any(o.error for o in found.values())
        seconds = time.perf_counter() - begin
        print(
            f"{name}: {different} of {len(requests)} differ; {tokens} tokens, {tokens / seconds:.0f} a second, "
            f"{preempted} preempted",
            flush=True,
        )
        if name.startswith("depth 2, bursts"):  # the same engine again: its cache is warm
            warm = outputs(engine, requests, "none")
            different = sum(warm[i].digest != reference[i].digest for i in range(len(requests)))
            cached = sum(o.stats.cached_tokens for o in warm.values())
            failed |= different > 0 or cached == 0
            print(f"from a warm cache: {different} of {len(requests)} differ; {cached} tokens cached", flush=True)
    other = outputs(llm.fresh_engine(), [_other_seed(r) for r in requests], "none")
    half = len(requests) // 2
    same = sum(other[i].digest == reference[i].digest for i in range(half, len(requests)))
    print(f"control, other seeds: {half - same} of {half} differ", flush=True)
    return failed or same > half // 20


def _other_seed(request: Request) -> Request:
    from dataclasses import replace

    return replace(request, params=replace(request.params, seed=(request.params.seed or 0) + 77777))


if __name__ == "__main__":
    main()
