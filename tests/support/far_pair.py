"""A model and its draft model on a far device, played without either: which drafts come true is drawn beforehand.

The task of a request says how often the first, second, ... child that is drafted behind a token is the right one; the
draft is as sure of the first as it should be. Passes take about what they took for models of 1.5B and 0.5B on an H200.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.support.adversaries import collect
from tests.support.far_backend import TRIP, FarBackend
from verispec.backends.cost import CostTable
from verispec.backends.native_backend import NativeBackend
from verispec.backends.protocol import Pass, PassResult
from verispec.config import EngineConfig
from verispec.engine import Engine, Request
from verispec.engine.step_rates import LEFT_OUT
from verispec.kv import DRAFT_STORE, TARGET_STORE
from verispec.sampling.draw import DrawResult, NoisyTopK
from verispec.spec.registry import DraftSetup, make_drafters
from verispec.spec.speculation import AUTO, Speculation
from verispec.spec.tree import TreeShape
from verispec.types import SampleOutput, SamplingParams

ROWS = (1, 8, 16, 32, 64, 128, 2048)
SECONDS = (1.0e-3, 1.06e-3, 1.3e-3, 1.5e-3, 1.9e-3, 2.7e-3, 20e-3)
DRAFT_SECONDS = (0.36e-3, 0.38e-3, 0.4e-3, 0.45e-3, 0.55e-3, 0.75e-3, 6e-3)
VOCAB, CONTEXT_LEN, NUM_PROMPT, MOST_CHILDREN = 30_000, 640, 40, 8
# Draft probabilities, which are also how often such a token is right: evenly from the first to the last.
UNSURE, SURE = (0.0, 0.5), (0.9, 1.0)


class Task(NamedTuple):
    """Answers of so many tokens, in which a draft's first child is right so often; the second catches a share `later`
    of what it missed, the third half as much of the rest, the fourth a third."""

    acceptance: float
    later: float
    num_tokens: int


class Offer(NamedTuple):
    """By position: which child is right, MOST_CHILDREN for none, and how probable the first one is."""

    right: NDArray[np.int64]
    probability: NDArray[np.float64]


@dataclass(frozen=True)
class Told:
    """What requests are about, by their seeds. No text has a token twice."""

    tasks: Sequence[Task]

    def prompt(self, seed: int) -> list[int]:
        return self.text(seed)[:NUM_PROMPT]

    def text(self, seed: int) -> list[int]:
        length = NUM_PROMPT + self.tasks[seed].num_tokens + 2
        return np.random.default_rng(seed).permutation(VOCAB)[:length].tolist()

    def offer(self, seed: int) -> Offer:
        task, rng = self.tasks[seed], np.random.default_rng([seed, 1])
        unsure, sure = np.mean(UNSURE), np.mean(SURE)
        is_sure = rng.random(CONTEXT_LEN) < (task.acceptance - unsure) / (sure - unsure)
        probability = np.where(is_sure, rng.uniform(*SURE, CONTEXT_LEN), rng.uniform(*UNSURE, CONTEXT_LEN))
        right = np.full(CONTEXT_LEN, MOST_CHILDREN)
        for rank in reversed(range(1, MOST_CHILDREN)):
            right[rng.random(CONTEXT_LEN) < task.later / rank] = rank
        right[rng.random(CONTEXT_LEN) < probability] = 0
        return Offer(right, probability)


class FarModels(FarBackend):
    """A target that draws `text(seed)`, and a draft model in a store of its own: `_drafted` says what it finds."""

    def __init__(
        self, text: Callable[[int], Sequence[int]], *, vocab_size: int, context_len: int, num_running: int,
        host: Callable[[], float] = lambda: 0.0,
    ) -> None:  # fmt: skip
        super().__init__(
            text, vocab_size=vocab_size, num_slots=4 * num_running * context_len, context_len=context_len,
            num_seq_rows=num_running, host=host,
        )  # fmt: skip
        self.limits = replace(self.limits, num_stores=2, trees=True)
        self._num_drafting = 0  # draft passes of this burst

    def _seconds(self, part: Pass) -> float:
        is_draft = part.store == DRAFT_STORE
        self._num_drafting += is_draft
        return float(np.interp(len(part.rows), ROWS, DRAFT_SECONDS if is_draft else SECONDS))

    def _left_out(self, pass_: Pass) -> float:
        """Draft passes are sent for every level of every round, and left out where nobody wants them."""
        burst, num_drafting = pass_.burst, self._num_drafting
        self._num_drafting = 0
        if burst is None:
            return 0.0
        drafted = [part for part in burst.drafts if not part.looks_up]
        levels = sum(int(part.lengths.max()) if part.tree is None else len(part.tree.keep) for part in drafted)
        return LEFT_OUT * max(0, (1 + burst.num_rounds) * levels - num_drafting)

    def _found(self, part: Pass) -> PassResult:
        return self._drafted(part) if part.store == DRAFT_STORE else super()._found(part)

    def _drafted(self, part: Pass) -> PassResult:
        """What the draft model finds in a pass."""
        raise AssertionError("somebody has to draft")


class RealDrafts(FarModels):
    """Drafts are those of a real model on this machine's CPU, which takes no time of the device's."""

    def __init__(self, draft: NativeBackend, text: Callable[[int], Sequence[int]], **sizes: Any) -> None:
        super().__init__(text, **sizes)
        self._draft, draft.resident = draft, self.resident

    def _drafted(self, part: Pass) -> PassResult:
        return self._draft.run(replace(part, store=TARGET_STORE))


class FarPair(FarModels):
    """`told.offer(seed)` are the drafts that a request of this seed is offered, `told.text(seed)` is what it draws."""

    def __init__(self, told: Told, num_running: int, host: Callable[[], float] = lambda: 0.0) -> None:
        super().__init__(told.text, vocab_size=VOCAB, context_len=CONTEXT_LEN, num_running=num_running, host=host)
        self._offer, self._offers = told.offer, dict[int, Offer]()

    def _bound(self, seq_row: int, seed: int) -> None:
        super()._bound(seq_row, seed)
        self._offers[seq_row] = self._offer(seed)

    def _drafted(self, part: Pass) -> PassResult:
        draw, several = part.wanted.draw, part.wanted.noisy_top_k
        if draw is not None:
            found = self._children(part, draw.rows, 1)
            return PassResult(DrawResult(found.token_ids[:, 0], found.logprobs[:, 0]))
        if several is None:
            return PassResult()
        return PassResult(noisy_top_k=self._children(part, several.rows, several.k))

    def _children(self, part: Pass, rows: NDArray[np.int32], count: int) -> NoisyTopK:
        """Behind a token that is not the text's, none is right."""
        tokens, logprobs = np.zeros((len(rows), count), np.int64), np.zeros((len(rows), count), np.float32)
        for i, row in enumerate(rows.tolist()):
            seq_row, position = int(part.rows.seq_rows[row]), int(part.rows.positions[row])
            if not seq_row:
                continue
            text, offer = self._texts[seq_row], self._offers[seq_row]
            likely, rank = max(0.01, offer.probability[position]), offer.right[position]
            tokens[i] = (text[position + 1] + 1 + np.arange(count)) % VOCAB
            if part.rows.token_ids[row] == text[position] and rank < count:
                tokens[i, rank] = text[position + 1]
            logprobs[i] = np.log(np.concatenate([[likely], (1 - likely) / 2 ** np.arange(1, count)]))
        return NoisyTopK(tokens, logprobs, logprobs)


ARMS = {
    "none": Speculation("none"),
    "chain of 4": Speculation("model", TreeShape.parse("chain:4")),
    "up to 7": Speculation("model"),
    "beam": Speculation("model", TreeShape.parse("beam:2,3")),
    AUTO: Speculation(AUTO),
}


class Case(NamedTuple):
    """Requests of these tasks, so many at once. All are there from the start; or one caller sends so many, and waits
    for all of them before the next (`is_joint`)."""

    tasks: Sequence[Task]
    batch: int = 1
    is_joint: bool = False


def hard(num_tokens: int) -> Task:
    return Task(0.3, 0.1, num_tokens)


def easy(num_tokens: int = 128) -> Task:
    return Task(0.85, 0.35, num_tokens)


def eight_kinds(times: int) -> list[Task]:
    """Four answers of a kind, then of the next one."""
    rng = random.Random(1)
    kinds = [0.3 + 0.6 * i / 7 for i in (5, 0, 3, 7, 1, 6, 2, 4)]
    return [Task(kind, kind / 2.5, rng.randint(112, 160)) for _ in range(times) for kind in kinds for _ in range(4)]


def cases(times: int = 1) -> dict[str, Case]:
    """So many times as many requests."""
    rng = random.Random(0)
    short = [hard(rng.randint(8, 30)) for _ in range(24 * times)]
    long = [rng.randint(96, 160) for _ in range(32 * times)]
    by_turns = [task for i in range(4 * times) for task in (*short[4 * i : 4 * i + 4], easy())]
    mixed = [easy(n) if i % 8 < 3 else hard(n) for i, n in enumerate(long)]
    return {
        "short hard answers": Case(short),
        "long hard ones": Case([hard(192)] * 4 * times),
        "long easy ones": Case([easy()] * 6 * times),
        "four short hard, one easy, by turns": Case(by_turns),
        "short hard, then easy": Case([*short[: 16 * times], *[easy()] * 4 * times]),
        "eight tasks by turns": Case(eight_kinds(times)),
        "8 at once, 3 of them easy": Case(mixed, 8),
        "8 at once, easy": Case([easy(n) for n in long], 8),
        "32 at once, short and hard": Case([hard(rng.randint(12, 36)) for _ in range(192 * times)], 32),
        "8 of one caller, hard": Case([hard(128)] * 16 * times, 8, is_joint=True),
        "8 of one caller, 3 of them easy": Case(([easy()] * 3 + [hard(128)] * 5) * 2 * times, 8, is_joint=True),
        "8 of one caller, easy": Case([easy()] * 24 * times, 8, is_joint=True),
        "short hard, then short easy": Case([*[hard(24)] * 8, *[easy(24)] * 60 * times]),
    }


class Played(NamedTuple):
    tokens_per_second: float
    drafted: float  # nodes for a token
    accepted: float  # of them
    digests: list[str]


def far_engine(backend: FarModels, batch: int, drafters: Sequence[str] = ("none", "model")) -> Engine:
    """`model` drafts whatever that promises, `auto` where it does."""
    cost, draft_cost = (
        CostTable(ROWS, seconds, (0.0,) * len(ROWS), learns=True, trip=TRIP) for seconds in (SECONDS, DRAFT_SECONDS)
    )
    setup = DraftSetup(backend=backend, cost=cost, draft_cost=draft_cost, draft_len=7, force=True)  # type: ignore[arg-type]
    made = make_drafters(setup)
    return Engine(
        backend, family=FarBackend.shapes, drafters={name: made[name] for name in drafters}, cost=cost,  # type: ignore[arg-type]
        clock=lambda: backend.now,
        config=EngineConfig(
            num_slots=backend.limits.num_slots, row_budget=2048, max_running=batch, depth=2,
            max_len=backend.limits.context_len,
        ),
    )  # fmt: skip


def play(case: Case, arm: str, host: Callable[[], float] = lambda: 0.0) -> Played:
    tasks, batch, is_joint = case
    told = Told(tasks)
    backend = FarPair(told, batch, host)
    engine, outputs, start = far_engine(backend, batch), list[SampleOutput](), backend.now
    size = batch if is_joint else len(tasks)
    for first in range(0, len(tasks), size):
        for seed, task in enumerate(tasks[first : first + size], first):
            params = SamplingParams(max_tokens=task.num_tokens, seed=seed, temperature=0.0)
            engine.add(
                Request(told.prompt(seed), params, ARMS[arm], is_streamed=False, batch=1 + first if is_joint else 0)
            )
        outputs += [output for _, output in sorted(collect(engine).items())]
    num_tokens, drafted = sum(len(o.token_ids) for o in outputs), sum(o.stats.drafted for o in outputs)
    accepted = sum(o.stats.accepted for o in outputs) / max(1, drafted)
    return Played(num_tokens / (backend.now - start), drafted / num_tokens, accepted, [o.digest for o in outputs])
