"""Receipts of a GPU, to be replayed on a machine without one: greedy, sampled with a seed, and with log-probabilities.

    python bench/gpu_receipt.py MODEL FILE [BACKEND]

writes one receipt per line; `verispec replay FILE -m MODEL` checks them anywhere, bit for bit.
"""

from __future__ import annotations

import sys
from pathlib import Path

from verispec.llm import LLM

REQUESTS = (
    ("Why is the sky blue?", {"max_tokens": 48}),
    ("Write a short poem about the sea.", {"max_tokens": 48, "temperature": 1.0, "seed": 7}),
    ("List three primes.", {"max_tokens": 40, "temperature": 0.8, "top_p": 0.9, "seed": 11, "logprobs": 3}),
)


def main() -> None:
    model, file, *backend = sys.argv[1:]
    prompts = [{"messages": [{"role": "user", "content": text}], **options} for text, options in REQUESTS]
    with LLM(model, backend=backend[0] if backend else "cuda", drafter="none") as llm:
        answers = llm.generate(prompts, receipts=True)
        lines = [receipt.to_json() + "\n" for answer in answers for receipt in answer.receipts]
        Path(file).write_text("".join(lines), encoding="utf-8")
        for (text, _), answer in zip(REQUESTS, answers, strict=True):
            print(f"{text} -> {answer.text!r}")
        print(f"{len(lines)} receipts in {file}, profile {llm.profile}")


if __name__ == "__main__":
    main()
