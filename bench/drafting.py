"""What the benchmarks of drafters share: prompts by task, runs of many arms in turns, passes as they were run."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from verispec import LLM, SamplingParams
from verispec.backends.cost import CostTable
from verispec.backends.protocol import Backend, Burst, BurstResult, Pass, Ticket, View
from verispec.config import EngineConfig
from verispec.engine import Engine, Request
from verispec.spec.drafter import Drafter
from verispec.spec.speculation import Speculation
from verispec.types import SampleOutput

CHAT = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
NAMES = {"summarization": "summarisation", "math_reasoning": "maths", "qa": "question answering"}


def read_tasks(llm: LLM, folder: Path, *, count: int, max_len: int) -> dict[str, list[list[int]]]:
    """`count` prompts of each task as token ids, through the chat template, cut to their last `max_len` tokens.

    `folder` holds spec_bench_even.jsonl (Spec-Bench, by category) and humaneval_even.jsonl (code).
    """
    texts: dict[str, list[str]] = {}
    for line in (folder / "spec_bench_even.jsonl").read_text(encoding="utf-8").splitlines():
        item = json.loads(line)
        task = "chat" if item["category"] in CHAT else NAMES.get(item["category"], item["category"])
        texts.setdefault(task, []).append(item["turns"][0])
    code = (folder / "humaneval_even.jsonl").read_text(encoding="utf-8").splitlines()
    texts["code"] = ["Complete this function.\n\n" + json.loads(line)["prompt"] for line in code]

    def ids(text: str) -> list[int]:
        return llm.chat_ids([{"role": "user", "content": text}])[-max_len:]

    return {
        task: [ids(listed[i * len(listed) // count]) for i in range(count)] for task, listed in sorted(texts.items())
    }


class PassRecord(NamedTuple):
    """A pass as it ran."""

    view: View
    store: int
    num_rows: int
    context_tokens: int


@dataclass(slots=True)
class Recorder:
    """A backend that notes each pass."""

    backend: Backend
    passes: list[PassRecord] = field(default_factory=list)
    seconds: float = 0.0  # inside passes

    def clear(self) -> None:
        self.passes, self.seconds = [], 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def submit(self, pass_: Pass) -> Ticket:
        rows = pass_.rows
        context = int((rows.prefix_lens + rows.tail_lens)[rows.seq_rows > 0].sum())
        self.passes.append(PassRecord(pass_.view, pass_.store, len(rows), context))
        start = time.perf_counter()
        ticket = self.backend.submit(pass_)
        result = ticket.result()
        self.seconds += time.perf_counter() - start
        if pass_.burst is not None and result.burst is not None:
            self._note_burst(pass_, pass_.burst, result.burst)
        return ticket

    def _note_burst(self, pass_: Pass, burst: Burst, found: BurstResult) -> None:
        """The passes that the backend ran by itself: drafts of every round, and the verifications behind the first."""
        lengths = pass_.rows.positions[burst.rows] + 1
        for i in range(found.accepted.shape[1]):
            ran, drafted = found.accepted[:, i] >= 0, (found.drafts[:, i] >= 0).sum(axis=-1)
            for part in burst.drafts:
                for k in range(int(drafted[part.sequences].max())):
                    live = part.sequences[drafted[part.sequences] > k]
                    count = part.first_rows if k == 0 else 1
                    context = int((lengths[live] + k).sum()) * count
                    self.passes.append(PassRecord(part.view, part.store, len(live) * count, context))
            if i and ran.any():
                context = int(((lengths + drafted) * (1 + drafted))[ran].sum())
                self.passes.append(PassRecord(pass_.view, pass_.store, int((1 + drafted)[ran].sum()), context))
            lengths = lengths + np.maximum(0, found.accepted[:, i] + 1)


@dataclass(slots=True)
class Run:
    """One run of one arm: generation alone, the prompts being in the cache."""

    outputs: list[SampleOutput]
    seconds: float
    passes: list[PassRecord]
    pass_seconds: float

    @property
    def num_tokens(self) -> int:
        return sum(len(o.token_ids) for o in self.outputs)

    @property
    def rate(self) -> float:
        return self.num_tokens / self.seconds

    def total(self, name: str) -> int:
        return sum(getattr(o.stats, name) for o in self.outputs)

    @property
    def acceptance(self) -> float:
        return self.total("accepted") / max(1, self.total("drafted"))

    @property
    def block_efficiency(self) -> float:
        """Tokens per target pass of a sequence."""
        return self.num_tokens / sum(o.stats.passes + o.stats.fast_passes for o in self.outputs)

    @property
    def host_seconds(self) -> float:
        """What the engine takes between two passes."""
        return (self.seconds - self.pass_seconds) / len(self.passes)

    def predicted_seconds(self, cost_of: Callable[[View, int], CostTable]) -> float:
        """What its passes should have taken, without what the engine does between them."""
        tables = {key: cost_of(*key) for key in {(p.view, p.store) for p in self.passes}}
        return sum(tables[p.view, p.store].seconds(p.num_rows, p.context_tokens) for p in self.passes)


class Stage:
    """One engine with the drafters of all arms, each under its own name; prompts stay in its prefix cache."""

    def __init__(
        self,
        llm: LLM,
        drafters: Callable[[Backend], dict[str, Drafter]],
        *,
        max_running: int,
        max_draft: int | None = None,
    ) -> None:
        self.recorder = Recorder(llm.backend)
        found = llm.calibration
        self._engine = Engine(
            self.recorder, family=found.family, cost=found.cost, drafters=drafters(self.recorder),
            config=EngineConfig(num_slots=llm.backend.limits.num_slots, max_running=max_running),
        )  # fmt: skip

    def warm(self, prompts: Sequence[Sequence[int]], *, drafter: str = "none", tokens: int = 1) -> None:
        """Put the prompts' K/V into the cache, that of a draft model too if it drafts the few tokens."""
        params = SamplingParams(max_tokens=tokens)
        self._run([Request(prompt, params, Speculation(drafter)) for prompt in prompts])

    def run(self, prompts: Sequence[Sequence[int]], params: SamplingParams, **request: Any) -> Run:
        """Generate from all prompts at once; `request` are further fields of the requests, the drafter above all."""
        self.recorder.clear()
        return self._run([Request(prompt, params, **request) for prompt in prompts])

    def _run(self, requests: Sequence[Request]) -> Run:
        ids = [self._engine.add(request) for request in requests]
        found: dict[int, SampleOutput] = {}
        start = time.perf_counter()
        while self._engine.has_work:
            found |= {e.request_id: e.output for e in self._engine.step() if e.output is not None}
        return Run([found[i] for i in ids], time.perf_counter() - start, self.recorder.passes, self.recorder.seconds)


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"
