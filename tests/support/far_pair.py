"""A model and its draft model on a far device, played without either: which drafts come true is drawn beforehand.

The text of a request says how often the first, second, ... child that is drafted behind a token is the right one, and
how sure of it the draft is: mostly where it is right. Passes take what they took for a pair of 1.5B and 0.5B on an H200.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.support.adversaries import collect
from tests.support.far_backend import TRIP, FarBackend
from verispec.backends.cost import CostTable
from verispec.backends.protocol import Pass, PassResult
from verispec.config import EngineConfig
from verispec.engine import Engine, Request
from verispec.engine.policy import LEFT_OUT
from verispec.kv import DRAFT_STORE
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


def table(seconds: Sequence[float], trip: float = 0.0) -> CostTable:
    return CostTable(ROWS, tuple(seconds), (0.0,) * len(ROWS), learns=trip > 0, trip=trip)


class Task(NamedTuple):
    """Answers of so many tokens, in which a draft's first child is right so often; the second catches a share `later` of
    what it missed, the third half as much of the rest, the fourth a third."""

    acceptance: float
    later: float
    num_tokens: int


class Offer(NamedTuple):
    """By position: which child is right, MOST_CHILDREN for none, and how probable the first one is."""

    right: NDArray[np.int64]
    sure: NDArray[np.float64]


@dataclass(frozen=True)
class Told:
    """What a request is about, by its seed."""

    tasks: Sequence[Task]

    def prompt(self, seed: int) -> list[int]:
        return np.random.default_rng(seed).integers(0, VOCAB, NUM_PROMPT).tolist()

    def text(self, seed: int) -> list[int]:
        answer = np.random.default_rng([seed, 1]).permutation(VOCAB)[: self.tasks[seed].num_tokens + 2].tolist()
        return self.prompt(seed) + answer

    def offer(self, seed: int) -> Offer:
        task, rng = self.tasks[seed], np.random.default_rng([seed, 2])
        unsure, sure = np.mean(UNSURE), np.mean(SURE)
        is_sure = rng.random(CONTEXT_LEN) < (task.acceptance - unsure) / (sure - unsure)
        probability = np.where(is_sure, rng.uniform(*SURE, CONTEXT_LEN), rng.uniform(*UNSURE, CONTEXT_LEN))
        right = np.full(CONTEXT_LEN, MOST_CHILDREN)
        for rank in reversed(range(1, MOST_CHILDREN)):
            right[rng.random(CONTEXT_LEN) < task.later / rank] = rank
        right[rng.random(CONTEXT_LEN) < probability] = 0
        return Offer(right, probability)


class FarPair(FarBackend):
    """`told.offer(seed)` are the drafts that a request of this seed is offered, `told.text(seed)` what it draws."""

    def __init__(self, told: Told, num_running: int, host: Callable[[], float] = lambda: 0.0) -> None:
        super().__init__(
            told.text, vocab_size=VOCAB, num_slots=4 * num_running * CONTEXT_LEN, context_len=CONTEXT_LEN,
            num_seq_rows=num_running, host=host,
        )  # fmt: skip
        self.limits = replace(self.limits, num_stores=2, trees=True)
        self._offer, self._offers = told.offer, dict[int, Offer]()
        self._num_drafting = 0  # draft passes since the last one that verified

    def _bound(self, seq_row: int, seed: int) -> None:
        super()._bound(seq_row, seed)
        self._offers[seq_row] = self._offer(seed)

    def _seconds(self, part: Pass) -> float:
        if part.store == DRAFT_STORE:
            self._num_drafting += 1
            return float(np.interp(len(part.rows), ROWS, DRAFT_SECONDS))
        return float(np.interp(len(part.rows), ROWS, SECONDS))

    def _left_out(self, pass_: Pass) -> float:
        """Draft passes were sent for every level of every round, and those that nobody wanted were left out."""
        burst, ran = pass_.burst, self._num_drafting
        self._num_drafting = 0
        if burst is None:
            return 0.0
        drafted = [part for part in burst.drafts if not part.looks_up]
        levels = sum(int(part.lengths.max()) if part.tree is None else len(part.tree.keep) for part in drafted)
        return LEFT_OUT * max(0, (1 + burst.num_rounds) * levels - ran)

    def _found(self, part: Pass) -> PassResult:
        if part.store != DRAFT_STORE:
            return super()._found(part)
        wanted = part.wanted
        if wanted.draw is not None:
            found = self._children(part, wanted.draw.rows, 1)
            return PassResult(DrawResult(found.token_ids[:, 0], found.logprobs[:, 0]))
        if wanted.noisy_top_k is not None:
            return PassResult(noisy_top_k=self._children(part, wanted.noisy_top_k.rows, wanted.noisy_top_k.k))
        return PassResult()

    def _children(self, part: Pass, rows: NDArray[np.int32], count: int) -> NoisyTopK:
        """Behind tokens that are not the text's, none is right."""
        tokens = np.zeros((len(rows), count), np.int64)
        logprobs = np.zeros((len(rows), count), np.float32)
        for i, row in enumerate(rows.tolist()):
            seq_row, position = int(part.rows.seq_rows[row]), int(part.rows.positions[row])
            if not seq_row:
                continue
            text, offer = self._texts[seq_row], self._offers[seq_row]
            sure, right = offer.sure[position], text[position + 1]
            tokens[i] = (right + 1 + np.arange(count)) % VOCAB
            if part.rows.token_ids[row] == text[position] and offer.right[position] < count:
                tokens[i, offer.right[position]] = right
            logprobs[i] = np.log([max(sure, 0.01), *((1 - sure) / 2 ** np.arange(1, count))][:count])
        return NoisyTopK(tokens, logprobs, logprobs)


# What is compared: a name, what requests ask for, and whether that is drafted whatever it promises.
ARMS = {
    "none": Speculation("none"),
    "chain of 4": Speculation("model", TreeShape.parse("chain:4")),
    "up to 7": Speculation("model"),
    "beam": Speculation("model", TreeShape.parse("beam:2,3")),
    AUTO: Speculation(AUTO),
}


class Played(NamedTuple):
    tokens_per_second: float
    drafted: float  # nodes for a token
    accepted: float  # of them
    digests: list[str]


def pair_engine(told: Told, batch: int, host: Callable[[], float] = lambda: 0.0) -> tuple[FarPair, Engine]:
    """With drafters that draft where they are named, whatever that promises; `auto` weighs it."""
    backend = FarPair(told, batch, host)
    cost = table(SECONDS, TRIP)
    setup = DraftSetup(backend=backend, cost=cost, draft_cost=table(DRAFT_SECONDS, TRIP), draft_len=7, force=True)
    engine = Engine(
        backend, family=FarBackend.shapes, drafters=make_drafters(setup), cost=cost, clock=lambda: backend.now,
        config=EngineConfig(
            num_slots=backend.limits.num_slots, row_budget=2048, max_running=batch, depth=2, max_len=CONTEXT_LEN
        ),
    )  # fmt: skip
    return backend, engine


def play(tasks: Sequence[Task], batch: int, arm: str, *, is_joint: bool = False) -> Played:
    """Requests of these tasks: all there from the start, of which so many run at once; or so many by one caller, who
    waits for all of them before the next come."""
    told = Told(tasks)
    backend, engine = pair_engine(told, batch)
    outputs = list[SampleOutput]()
    for first in range(0, len(tasks), batch if is_joint else len(tasks)):
        for seed, task in enumerate(tasks[first : first + batch] if is_joint else tasks, first):
            params = SamplingParams(max_tokens=task.num_tokens, seed=seed, temperature=0.0)
            number = 1 + first if is_joint else 0
            engine.add(Request(told.prompt(seed), params, ARMS[arm], is_streamed=False, batch=number))
        outputs += [output for _, output in sorted(collect(engine).items())]
    num_tokens, drafted = sum(len(o.token_ids) for o in outputs), sum(o.stats.drafted for o in outputs)
    accepted = sum(o.stats.accepted for o in outputs) / max(1, drafted)
    return Played(num_tokens / backend.now, drafted / num_tokens, accepted, [o.digest for o in outputs])
