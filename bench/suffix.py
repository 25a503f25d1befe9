"""Drafter `suffix` against prompt lookup and against no drafts, by task. Tokens must be equal, or the run fails.

    python bench/suffix.py --spec-bench FILE.jsonl --human-eval FILE.jsonl --per-task 4 --new 96

Tasks are Spec-Bench's, HumanEval, and `edits`: a file that a user has changed in steps, the answer to each step being
the next one's input. Arms take turns prompt by prompt, each on an engine of its own that keeps what it learns: a busy
moment hits all of them. Figures are tokens a second against `none`: the ratio of total times (of medians over
--repeats), tokens a pass, and the share of drafted tokens that were accepted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from verispec import LLM, SamplingParams
from verispec.engine import Engine
from verispec.spec.drafter import Curve, Drafter, Refusal
from verispec.spec.none import NoDrafter
from verispec.spec.rate import Rate
from verispec.spec.suffix import SuffixConfig, SuffixDrafter
from verispec.spec.turn import SequenceView, Turn
from verispec.types import Draft, SampleOutput

CHAT = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
STEPS = (
    "Rename the first function to main.",
    "Add a comment above each return.",
    "Add type hints.",
    "Add a docstring to each function.",
)


class PromptLookup(NoDrafter):
    """What followed the last 4, 3 or 2 tokens the previous time they occurred in the same sequence."""

    def __init__(self) -> None:
        super().__init__("the last 2 tokens occurred nowhere before")
        self._rates = {n: Rate.fading(0.5, 4.0, 0.98) for n in (4, 3, 2)}
        self._positions: dict[tuple[int, ...], int] = {}
        self._match = (0, 0, 0)  # its length, the position behind it, and the sequence's length then

    @property
    def version(self) -> int:  # type: ignore[override]
        return sum(rate.version for rate in self._rates.values())

    def state(self, sequence: SequenceView) -> int | Refusal:
        tokens, end = sequence.token_ids, len(sequence.token_ids)
        for position in range(self._match[2] + 1, end + 1):
            self._match = (0, 0, end)
            for n in self._rates:
                ngram = tuple(tokens[max(0, position - n) : position])
                if not self._match[0] and ngram in self._positions:
                    self._match = (n, self._positions[ngram], end)
                self._positions[ngram] = position
        return self._match[0] or self._refusal

    def curves(self, key: object) -> tuple[Curve, ...]:
        assert isinstance(key, int)
        return (Curve.chain(16, self._rates[key].value),)

    def draft(self, turns: Sequence[Turn]) -> list[Draft]:
        return [Draft.chain(self._follow(turn.sequence, turn.choice.num_nodes)) for turn in turns]

    def _follow(self, sequence: SequenceView, num_nodes: int) -> list[int]:
        followed = list(sequence.token_ids[self._match[1] : self._match[1] + num_nodes])
        while len(followed) < num_nodes:
            followed += followed[: num_nodes - len(followed)]
        return followed

    def observe(self, turn: Turn) -> None:
        if turn.verdict is not None and isinstance(turn.draft, Draft):
            self._rates[self._match[0]].observe_chain(len(turn.verdict.path), len(turn.draft))

    def forget(self, sequence: SequenceView) -> None:
        self._positions, self._match = {}, (0, 0, 0)


ARMS = {
    "none": NoDrafter,
    "lookup": PromptLookup,
    "suffix": lambda: SuffixDrafter(SuffixConfig(history_len=0)),
    "suffix, history": SuffixDrafter,
}


class Task(NamedTuple):
    name: str
    prompts: list[str]
    steps: Sequence[str] = ()  # changes, one after the other, to the file that the one prompt is


def tasks(options: argparse.Namespace) -> Iterator[Task]:
    count = options.per_task
    if options.spec_bench:
        groups: dict[str, list[str]] = defaultdict(list)
        for line in options.spec_bench.read_text(encoding="utf-8").splitlines():
            found = json.loads(line)
            name = "chat" if found["category"] in CHAT else found["category"]
            groups[name].append(found["turns"][0])
        for name, prompts in groups.items():
            yield Task(name, prompts[:: max(1, len(prompts) // count)][:count])
    if options.human_eval:
        problems = [json.loads(line) for line in options.human_eval.read_text(encoding="utf-8").splitlines()]
        spread = problems[:: max(1, len(problems) // count)][:count]
        yield Task("HumanEval", [f"Complete this function.\n```python\n{p['prompt']}```" for p in spread])
        for i, problem in enumerate(problems[1 : 1 + options.files]):
            yield Task(f"edits {i + 1}", [problem["prompt"] + problem["canonical_solution"]], STEPS)


def run(engine: Engine, llm: LLM, text: str, params: SamplingParams) -> tuple[SampleOutput, float]:
    """One prompt alone, and the seconds of its tokens behind the first."""
    request = llm.request({"messages": [{"role": "user", "content": text}]}, params)
    engine.add(replace(request, speculation=None))
    while engine.has_work:
        for event in engine.step():
            if event.output is not None:
                stats = event.output.stats
                return event.output, (stats.finish_time or 0.0) - (stats.first_token_time or 0.0)
    raise RuntimeError("the request has not ended")


class Bench:
    def __init__(self, llm: LLM, options: argparse.Namespace) -> None:
        self._llm = llm
        self._params = SamplingParams(max_tokens=options.new, temperature=options.temperature, seed=0)
        drafters: dict[str, Drafter] = {name: make() for name, make in ARMS.items()}
        self._engines = {name: llm.fresh_engine(drafters={name: drafter}) for name, drafter in drafters.items()}
        self.seconds: dict[tuple[str, str], float] = defaultdict(float)
        self.tokens: dict[str, int] = defaultdict(int)
        self.drafted: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
        self.passes: dict[tuple[str, str], int] = defaultdict(int)

    def measure(self, task: Task) -> None:
        name = task.name.split()[0]
        for prompt in task.prompts:
            text = prompt
            for step in task.steps or ("",):
                asked = f"{step} Answer with the whole file.\n```python\n{text}\n```" if step else text
                text = self._compare(name, asked)

    def _compare(self, name: str, text: str) -> str:
        """All arms, in turns; the answer, which is the same."""
        outputs = {}
        for arm, engine in self._engines.items():
            outputs[arm], seconds = run(engine, self._llm, text, self._params)
            self.seconds[name, arm] += seconds
            stats = outputs[arm].stats
            self.drafted[name, arm][0] += stats.accepted
            self.drafted[name, arm][1] += stats.drafted
            self.passes[name, arm] += stats.passes + stats.fast_passes
        if len({output.digest for output in outputs.values()}) != 1:
            raise SystemExit(f"{name}: a drafter changed the answer")
        self.tokens[name] += len(outputs["none"].token_ids) - 1
        return outputs["none"].text


def table(rounds: Sequence[Bench]) -> Iterator[str]:
    """A row per task: speed against `none`, tokens a pass, and the share of drafted tokens that was accepted."""
    arms = [arm for arm in ARMS if arm != "none"]
    yield "| task | tokens | none, tok/s | " + " | ".join(arms) + " |"
    yield "|---" * (3 + len(arms)) + "|"
    for name, count in rounds[0].tokens.items():
        seconds = {arm: statistics.median(b.seconds[name, arm] for b in rounds) for arm in ARMS}
        cells = []
        for arm in arms:
            accepted, drafted = rounds[0].drafted[name, arm]
            per_pass = rounds[0].passes[name, "none"] / rounds[0].passes[name, arm]
            share = accepted / max(1, drafted)
            cells.append(f"{seconds['none'] / seconds[arm]:.2f}x, {per_pass:.2f} a pass, {share:.0%} of {drafted}")
        yield f"| {name} | {count} | {count / seconds['none']:.0f} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--spec-bench", type=Path)
    parser.add_argument("--human-eval", type=Path)
    parser.add_argument("--per-task", type=int, default=4)
    parser.add_argument("--files", type=int, default=3, help="files that are edited")
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args()
    with LLM(options.model, drafter="none", prefix_cache=False) as llm:
        began = time.monotonic()
        rounds = []
        for _ in range(options.repeats):  # each with engines that have learned nothing
            bench = Bench(llm, options)
            for task in tasks(options):
                bench.measure(task)
                print(list(table([bench]))[-1], file=sys.stderr, flush=True)
            rounds.append(bench)
    print("\n".join(table(rounds)))
    print(f"{options.model}, T = {options.temperature:g}, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
