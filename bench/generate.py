"""Tokens per second of the engine, drafters interleaved in one run. Figures go to docs/benchmarks.md.

    python bench/generate.py --batch 1 8 32 --repeats 5

Each prompt has 128 tokens of English, each answer 128 tokens (EOS ignored). `quote` prompts ask the model to go on with
text it has just seen, which is what n-gram drafting is good at; `free` prompts are plain continuation. Digests of all
drafters must agree, or the run fails.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time

from workload import SENTENCES

from verispec import LLM, SamplingParams
from verispec.backends.blas import blas_name, cpu_name


def prompts(llm: LLM, kind: str, count: int, length: int) -> list[list[int]]:
    made = []
    for i in range(count):
        story = " ".join(SENTENCES[(i + j) % len(SENTENCES)] for j in range(12))
        ids = llm.tokenizer.encode(story)[:length]
        if kind == "quote":  # the text once, then its beginning again
            ids = (ids[: length * 3 // 4] + ids)[:length]
        made.append(ids)
    return made


def run(
    llm: LLM, batch: list[list[int]], drafter: str, num_new: int, temperature: float
) -> tuple[float, list[str], float]:
    params = SamplingParams(max_tokens=num_new, ignore_eos=True, seed=0, temperature=temperature)
    start = time.perf_counter()
    done = llm.generate(batch, params, drafter=drafter)
    seconds = time.perf_counter() - start
    tokens = sum(len(c.token_ids) for c in done)
    passes = max(c.stats.passes for c in done)
    return tokens / seconds, [c.digest for c in done], tokens / len(done) / passes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--kinds", nargs="+", default=["free", "quote"], choices=["free", "quote"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    options = parser.parse_args()
    llm = LLM(options.model, drafter="none", prefix_cache=False, history_len=0)
    print(f"{cpu_name()}; {blas_name()}; Python {platform.python_version()}; {options.model}; profile {llm.profile}")
    print("| prompts | batch | drafter | tok/s median (min-max) | tokens per pass | ratio to none |")
    print("|---|---|---|---|---|---|")
    for kind in options.kinds:
        for size in options.batch:
            batch = prompts(llm, kind, size, options.prompt_len)
            speeds: dict[str, list[float]] = {"none": [], "suffix": []}
            per_pass = {}
            digests = set()
            for _ in range(options.repeats):
                for drafter, found in speeds.items():
                    speed, digest, per_pass[drafter] = run(llm, batch, drafter, options.new, options.temperature)
                    found.append(speed)
                    digests.add(tuple(digest))
            assert len(digests) == 1, "drafters gave different bits"
            for drafter, found in speeds.items():
                ratio = statistics.median(a / b for a, b in zip(found, speeds["none"], strict=True))
                print(
                    f"| {kind} | {size} | {drafter} | {statistics.median(found):.1f} "
                    f"({min(found):.1f}-{max(found):.1f}) | {per_pass[drafter]:.2f} | {ratio:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
