"""What bursts of rounds that draft are worth: drafter `skip` or `model`, several rounds per submit against one.

    python bench/bursts.py TARGET.gguf --draft-model DRAFT.gguf    # drafter model
    python bench/bursts.py TARGET.gguf --drafter skip

Three arms take turns, and each turn gives the ratio of their speeds; one thread and CPU time, so that what else runs on
the machine counts less. They are: every draft pass and verification by the host, as requests have it that need the host
after each round; one round per submit (`max_burst` 1); up to 16. Drafts are forced and greedy, prompts are cached.
`skip` leaves out some sub-layers, whichever `tune` would choose. The outputs of all arms are compared.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace

from verispec import LLM, SamplingParams
from verispec.backends.protocol import FULL_VIEW, View
from verispec.engine import Engine
from verispec.kv import DRAFT_STORE, TARGET_STORE
from verispec.spec.drafter import Drafter
from verispec.spec.growth import DraftModel
from verispec.spec.model_drafter import ModelDrafter, ModelDrafterConfig, Source

ARMS = {"host": (1, True), "one round": (1, False), "bursts": (16, False)}  # max_burst, whether the host drafts
PROMPTS = (
    "Write a function that reverses a linked list, with comments.",
    "Explain in a few sentences why the sky is blue.",
    "List the planets of the solar system and one fact about each.",
    "Write a short story about a lighthouse keeper and a storm.",
)


def drafters(llm: LLM, name: str, draft_len: int) -> dict[str, Drafter]:
    """One that drafts in any case: with the second model, or with every fifth sub-layer left out."""
    every = range(2, llm.architecture.num_layers - 2)
    view = View.without(every[::5], every[2::5]) if name == "skip" else FULL_VIEW
    model = DraftModel(llm.backend, llm.calibration.cost, view, store=DRAFT_STORE if name == "model" else TARGET_STORE)
    config = ModelDrafterConfig(max_draft=draft_len, exits=name == "skip", force=True)
    return {name: ModelDrafter(name, lambda: Source(model, 0.8, 0.8), config)}


def timed(engine: Engine, llm: LLM, prompts: list[list[int]], params: SamplingParams, arm: str) -> tuple[float, list]:
    """Tokens for a second of CPU time, and all tokens."""
    max_burst, by_host = ARMS[arm]
    ids = [engine.add(replace(llm.request(prompt, params), speculation=None, is_streamed=False)) for prompt in prompts]
    sequences = [s for request_id in ids for s in engine._live[request_id]]
    engine._policy.rates.max_burst = max_burst
    for sequence in sequences:
        sequence.needs_host = by_host
    start = time.process_time()
    while engine.has_work:
        engine.step()
    seconds = time.process_time() - start
    return sum(s.num_output for s in sequences) / seconds, [tuple(s.token_ids) for s in sequences]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--draft-model")
    parser.add_argument("--drafter", choices=("skip", "model"), default="model")
    parser.add_argument("--draft-len", type=int, default=4)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=7)
    args = parser.parse_args()
    params = SamplingParams(max_tokens=args.tokens, ignore_eos=True)
    drafter = "model" if args.drafter == "model" else "none"  # loading with `skip` would search for its sub-layers
    with LLM(args.model, draft_model=args.draft_model, drafter=drafter, threads=1) as llm:
        texts = [llm.chat_ids([{"role": "user", "content": text}]) for text in PROMPTS]
        for batch in args.batch:
            prompts = [texts[i % len(texts)] for i in range(batch)]
            speeds: dict[str, list[float]] = {arm: [] for arm in ARMS}
            outputs = set()
            with llm.separate_engine(drafters=drafters(llm, args.drafter, args.draft_len)) as engine:
                for arm in (*ARMS, *list(ARMS) * args.pairs):
                    speed, tokens = timed(engine, llm, prompts, params, arm)
                    speeds[arm].append(speed)
                    outputs.add(tuple(tokens))
                totals = engine.totals
            assert len(outputs) == 1, "the arms differ"
            for arm in list(ARMS)[1:]:
                ratios = [a / b for a, b in zip(speeds[arm][1:], speeds["host"][1:], strict=True)]
                print(f"{batch} sequences, {arm} against host: {_range(ratios)}")
            ratios = [a / b for a, b in zip(speeds["bursts"][1:], speeds["one round"][1:], strict=True)]
            print(f"{batch} sequences, bursts against one round: {_range(ratios)}")
            rate = statistics.median(speeds["bursts"])
            print(f"  {rate:.1f} tokens per CPU second; {totals.accepted}/{totals.drafted} accepted")


def _range(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


if __name__ == "__main__":
    main()
