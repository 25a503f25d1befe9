"""verispec beside Hugging Face transformers on the same machine, model and work, interleaved in one run.

    make test-hf                                   # once: makes .venv-hf with torch and transformers
    .venv-hf/bin/python bench/versus_transformers.py --batch 1 8 32 --repeats 5

SmolLM2-135M in float32, 128 prompt and 128 new tokens per sequence, greedy, EOS ignored. transformers runs with its
default attention (sdpa) and cache; verispec runs deterministically, with drafter `none` and with `suffix`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch
from generate import prompts
from transformers import AutoModelForCausalLM

from verispec import LLM, SamplingParams
from verispec.backends.blas import blas_name, cpu_name
from verispec.model import DEFAULT_MODEL, resolve


def load_reference(threads: int) -> torch.nn.Module:
    torch.set_num_threads(threads)
    path = resolve(DEFAULT_MODEL)
    model = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32)
    return model.eval()


def run_reference(model: torch.nn.Module, batch: list[list[int]], num_new: int) -> float:
    ids = torch.tensor(batch)
    start = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new, min_new_tokens=num_new, do_sample=False
        )
    assert out.shape[1] == len(batch[0]) + num_new
    return len(batch) * num_new / (time.perf_counter() - start)


def run_verispec(llm: LLM, batch: list[list[int]], num_new: int, drafter: str) -> float:
    start = time.perf_counter()
    done = llm.generate(batch, SamplingParams(max_tokens=num_new, ignore_eos=True, seed=0), drafter=drafter)
    assert all(len(c.token_ids) == num_new for c in done)
    return len(batch) * num_new / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--new", type=int, default=128)
    options = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    reference, llm = load_reference(threads), LLM(prefix_cache=False, history_len=0)
    print(f"{cpu_name()}; {threads} cores; torch {torch.__version__}; {blas_name()}; profile {llm.profile}")
    print("| batch | transformers tok/s | verispec none | ratio | verispec suffix | ratio |")
    print("|---|---|---|---|---|---|")
    for size in options.batch:
        batch = prompts(llm, "free", size, 128)
        theirs, none, suffix = [], [], []
        for _ in range(options.repeats):
            theirs.append(run_reference(reference, batch, options.new))
            none.append(run_verispec(llm, batch, options.new, "none"))
            suffix.append(run_verispec(llm, batch, options.new, "suffix"))

        def cell(speeds: list[float]) -> str:
            return f"{statistics.median(speeds):.1f} ({min(speeds):.1f}-{max(speeds):.1f})"

        ratios = [statistics.median(a / b for a, b in zip(ours, theirs, strict=True)) for ours in (none, suffix)]
        print(
            f"| {size} | {cell(theirs)} | {cell(none)} | {ratios[0]:.2f} | {cell(suffix)} | {ratios[1]:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
