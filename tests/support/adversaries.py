"""Drafters and texts that misbehave; the oracle, what a request must give whatever they do; a bench to show it on.

Every drafter here offers all the nodes it may, at acceptance 1, so that the planner grants rows; none changes a
sequence. `expected` maps a sequence id to its prompt plus the oracle's tokens; the caller fills it as it adds requests.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace

from tests.support.fake_backend import FakeBackend
from verispec.backends.protocol import PassKind
from verispec.config import EngineConfig
from verispec.engine import Engine, Request
from verispec.spec.decode import DecodeDrafter
from verispec.spec.drafter import Curve, Drafter, Level
from verispec.spec.judging import judge
from verispec.spec.none import NoDrafter
from verispec.spec.speculation import AUTO, Speculation
from verispec.spec.suffix import SuffixDrafter
from verispec.spec.turn import SequenceView, Turn
from verispec.types import (
    NO_PARENT,
    Draft,
    FinishReason,
    SampleOutput,
    SamplingParams,
    TextPiece,
    TextSink,
)

VOCAB_SIZE = 8
FAMILY = (4, 8, 16)
MAX_LEN, MAX_DRAFT = 32, 4
SAMPLED = SamplingParams(max_tokens=8, temperature=1.0, seed=5, logprobs=2)
Expected = Mapping[int, Sequence[int]]
Guess = Callable[[SequenceView, int], Draft]


class Adversary:
    """A drafter made of one function, which may lie in what it promises."""

    has_probabilities = False
    has_trees = False
    is_companion = False
    needs_cheap_rows = False
    version = 0

    def __init__(self, guess: Guess, *, acceptance: float = 1.0, extra_nodes: int = 0) -> None:
        self._guess = guess
        self._acceptance = acceptance
        self._extra_nodes = extra_nodes

    def state(self, sequence: SequenceView) -> Hashable:
        return "any"

    def curves(self, key: Hashable) -> tuple[Curve, ...]:
        return (Curve(tuple(Level(1, self._acceptance) for _ in range(MAX_DRAFT + self._extra_nodes))),)

    def draft(self, turns: Sequence[Turn]) -> list[Draft]:
        return [self._guess(t.sequence, t.choice.num_nodes) for t in turns]

    def observe(self, turn: Turn) -> None:
        pass

    def forget(self, sequence: SequenceView) -> None:
        pass


class Failing(Adversary):
    """Raises in some of its verbs."""

    def __init__(self, guess: Guess, *verbs: str) -> None:
        super().__init__(guess)
        for verb in verbs:
            setattr(self, verb, self._fail)

    def _fail(self, *args: object) -> None:
        raise RuntimeError("this drafter is broken")


class Speechless(Adversary):
    """Promises something that is no curve."""

    def curves(self, key: Hashable) -> tuple[Curve, ...]:
        return (None,)  # type: ignore[return-value]


def adversaries(expected: Expected, vocab_size: int = VOCAB_SIZE) -> dict[str, Drafter]:
    """The honest drafters and every adversary, by name; "none" is the default."""
    rng = random.Random(0)

    def right(sequence: SequenceView, depth: int) -> int:
        """The oracle's token `depth` places after the committed ones; anything behind its end."""
        known, at = expected.get(sequence.sequence_id, ()), len(sequence.token_ids) + depth
        return known[at] if at < len(known) else rng.randrange(vocab_size)

    def wrong(sequence: SequenceView, depth: int) -> int:
        return (right(sequence, depth) + 1 + rng.randrange(vocab_size - 1)) % vocab_size

    def either(sequence: SequenceView, depth: int) -> int:
        return rng.choice((right, wrong))(sequence, depth)

    def chain(token_at: Callable[[SequenceView, int], int], extra: int = 0) -> Guess:
        return lambda sequence, quota: Draft.chain(token_at(sequence, i) for i in range(quota + extra))

    def tree(parent_of: Callable[[int], int], token_at: Callable[[SequenceView, int], int] = either) -> Guess:
        def guess(sequence: SequenceView, quota: int) -> Draft:
            parents = tuple(parent_of(i) for i in range(quota))
            depths: list[int] = []
            for parent in parents:
                depths.append(0 if parent == NO_PARENT else depths[parent] + 1)
            return Draft(tuple(token_at(sequence, depth) for depth in depths), parents)

        return guess

    def duplicates(sequence: SequenceView, quota: int) -> Draft:
        """Every node of the right chain twice; the children of both copies hang under the second."""
        tokens = tuple(right(sequence, i // 2) for i in range(quota))
        return Draft(tokens, tuple(i // 2 * 2 - 1 for i in range(quota)))

    def star(sequence: SequenceView, quota: int) -> Draft:
        return Draft(tuple(i % vocab_size for i in range(quota)), (NO_PARENT,) * quota)

    def random_parent(i: int) -> int:
        return rng.randrange(NO_PARENT, i)

    def constant(draft: object) -> Guess:
        return lambda sequence, quota: draft  # type: ignore[return-value]

    perfect = chain(right)
    return {
        "none": NoDrafter(),
        "suffix": SuffixDrafter(),
        "decode": DecodeDrafter(),
        "perfect": Adversary(perfect),
        "wrong": Adversary(chain(wrong)),
        "random": Adversary(chain(lambda sequence, depth: rng.randrange(vocab_size))),
        "every second": Adversary(chain(lambda sequence, depth: (right, wrong)[depth % 2](sequence, depth))),
        "random tree": Adversary(tree(random_parent)),
        "binary tree": Adversary(tree(lambda i: (i - 1) // 2 if i else NO_PARENT)),
        "deep tree": Adversary(tree(lambda i: max(i - 2, NO_PARENT))),
        "star": Adversary(star),
        "duplicate siblings": Adversary(duplicates),
        "out of vocabulary": Adversary(chain(lambda sequence, depth: vocab_size + depth)),
        "negative ids": Adversary(chain(lambda sequence, depth: -1 - depth)),
        "too many nodes": Adversary(chain(right, extra=1)),
        "parent ahead": Adversary(constant(Draft((1,), (0,)))),
        "no parents": Adversary(constant(Draft((1, 2), ()))),
        "not a draft": Adversary(constant(None)),
        "half a parent": Adversary(constant(Draft((1,), (-0.5,)))),  # type: ignore[arg-type]
        "nameless parent": Adversary(constant(Draft((1,), (None,)))),  # type: ignore[arg-type]
        "acceptance 2": Adversary(perfect, acceptance=2.0),
        "acceptance 1e300": Adversary(perfect, acceptance=1e300),
        "acceptance inf": Adversary(perfect, acceptance=math.inf),
        "acceptance NaN": Adversary(perfect, acceptance=math.nan),
        "acceptance -1": Adversary(perfect, acceptance=-1.0),
        "not a curve": Speechless(perfect),
        "promises too much": Adversary(perfect, extra_nodes=50),
        "fails to say": Failing(perfect, "state"),
        "fails to promise": Failing(perfect, "curves"),
        "fails to draft": Failing(perfect, "draft"),
        "fails to learn": Failing(perfect, "observe", "forget"),
        "fails": Failing(perfect, "state", "draft", "observe", "forget"),
    }


DRAFTER_NAMES = (*adversaries({}), AUTO)


class LetterText(TextSink):
    """One letter per token, held back by one token, so that the end has something to release."""

    can_stop = False

    def __init__(self) -> None:
        self._held = ""

    def push(self, token_id: int, *, may_stop: bool = True) -> TextPiece:
        released, self._held = self._held, chr(ord("a") + token_id)
        return TextPiece(released, stopped=False)

    def finish(self) -> str:
        return self._held


class StopText(LetterText):
    """Stops at the second "c", as a stop string would."""

    can_stop = True

    def __init__(self) -> None:
        super().__init__()
        self._left = 2

    def push(self, token_id: int, *, may_stop: bool = True) -> TextPiece:
        self._left -= token_id == 2
        return TextPiece(super().push(token_id).text, stopped=may_stop and self._left <= 0)


class PushFails(LetterText):
    """Cannot take the third token."""

    def __init__(self) -> None:
        super().__init__()
        self._pushes = itertools.count(1)

    def push(self, token_id: int, *, may_stop: bool = True) -> TextPiece:
        if next(self._pushes) == 3:
            raise UnicodeError("no such letter")
        return super().push(token_id)


class FinishFails(LetterText):
    """Cannot end."""

    def finish(self) -> str:
        raise UnicodeError("no end")


def collect(engine: Engine, max_steps: int = 10_000) -> dict[tuple[int, int], SampleOutput]:
    """Step until nothing is left; the outputs by (request id, sample index)."""
    outputs = {}
    for _ in range(max_steps):
        if not engine.has_work:
            return outputs
        for event in engine.step():
            if event.output is not None:
                outputs[event.request_id, event.sample_index] = event.output
    raise AssertionError(f"not finished after {max_steps} steps")


@functools.cache
def _alone(request: Request, max_len: int, nan_token: int | None, sabotage: str) -> tuple[SampleOutput, ...]:
    num_slots = 2 * max_len
    backend = FakeBackend(
        vocab_size=VOCAB_SIZE, context_len=max_len, num_slots=num_slots, nan_token=nan_token, sabotage=sabotage
    )
    config = EngineConfig(num_slots=num_slots, max_len=max_len, max_running=1, prefix_cache=False, row_budget=64)
    engine = Engine(backend, family=(1, 2, 4, 8, 16, 32, 64), drafters={"none": NoDrafter()}, config=config)
    engine.add(request)
    return tuple(output for _, output in sorted(collect(engine).items()))


def alone(
    request: Request, *, max_len: int, nan_token: int | None = None, sabotage: str = ""
) -> tuple[SampleOutput, ...]:
    """The oracle: each sample of the request by itself, without drafts, in a fresh engine without a prefix cache."""
    return _alone(replace(request, speculation=Speculation("none")), max_len, nan_token, sabotage)


def beyond(request: Request, *, max_len: int, nan_token: int | None = None) -> list[tuple[int, ...]]:
    """Prompt plus what each sample gives, and goes on to give if nothing stops it: drafts that run past the end."""
    texts = []
    for i, output in enumerate(alone(request, max_len=max_len, nan_token=nan_token)):
        text = (*request.prompt_ids, *output.token_ids)
        if len(text) < max_len:
            params = replace(request.params, n=i + 1, stop_ids=(), min_tokens=0, max_tokens=None, prompt_logprobs=None)
            more = alone(Request(text, params), max_len=max_len, nan_token=nan_token)[i]
            text += more.token_ids
        texts.append(text)
    return texts


def facts(output: SampleOutput) -> str:
    """Everything the promise covers, to the last bit of every float; NaN equals NaN."""
    parts = (output.digest, output.logprobs, output.prompt_logprobs, output.text, output.finish_reason, output.error)
    return repr(parts)


def keep_apart(engine: Engine) -> Engine:
    """The engine, running canonical and fast rows in passes of their own. With flat costs it would join them."""
    engine._passes._joins = lambda num_canonical, num_fast: False
    return engine


class Bench:
    """An engine on a fake backend that can be stepped by hand, with free slots poisoned after every step."""

    def __init__(
        self,
        *,
        num_slots: int = 256,
        nan_token: int | None = None,
        clock: Callable[[], float] = lambda: 0.0,
        joined: bool = False,
        **options: int,
    ) -> None:
        self.backend = FakeBackend(
            vocab_size=VOCAB_SIZE, context_len=MAX_LEN, num_slots=num_slots, max_tail=MAX_DRAFT, nan_token=nan_token
        )
        self.expected: dict[int, tuple[int, ...]] = {}
        self.nan_token = nan_token
        options = {"max_len": MAX_LEN, "max_draft": MAX_DRAFT, **options}
        config = EngineConfig(num_slots=num_slots, **options)
        self.engine = Engine(
            self.backend, family=FAMILY, drafters=adversaries(self.expected), config=config, clock=clock
        )
        if not joined:
            keep_apart(self.engine)
        self.requests: dict[int, Request] = {}

    def add(self, prompt: tuple[int, ...], params: SamplingParams = SAMPLED, drafter: str = "none", **options) -> int:
        request = Request(prompt, params, Speculation(drafter), **options)
        request_id = self.engine.add(request)
        self.requests[request_id] = request
        texts = beyond(request, max_len=MAX_LEN, nan_token=self.nan_token)
        for sequence, text in zip(self.engine._live[request_id], texts, strict=True):
            self.expected[sequence.sequence_id] = text
        return request_id

    def step(self) -> dict[int, int]:
        """One step; how many tokens each request received."""
        events = self.engine.step()
        self.engine.check()
        self.backend.poison(self.engine._pool._free)
        return {event.request_id: len(event.logprobs) for event in events}

    def finish(self) -> dict[int, SampleOutput]:
        """Run to the end, compare every deterministic sample with the oracle, and give sample 0 by request id."""
        outputs = {}
        for _ in range(1000):
            if not self.engine.has_work:
                break
            for event in self.engine.step():
                if event.output is not None:
                    outputs[event.request_id, event.sample_index] = event.output
            self.engine.check()
            self.backend.poison(self.engine._pool._free)
        assert not self.engine.has_work
        for (request_id, i), output in outputs.items():
            request = self.requests[request_id]
            if request.params.deterministic and output.finish_reason is not FinishReason.ABORT:
                assert facts(output) == facts(alone(request, max_len=MAX_LEN, nan_token=self.nan_token)[i])
        return {request_id: output for (request_id, i), output in outputs.items() if i == 0}

    def launch(self) -> Callable[[], list]:
        """A step up to its commit; the rest is returned."""
        step = self.engine._scheduler.plan()
        self.engine._drafters.draft(step.turns)
        landed = self.engine._passes.submit(step).collect()
        judge(landed.turns)
        return lambda: self.engine._committer.commit(landed, 0.0)

    def real_rows(self, kind: PassKind) -> list[int]:
        """Rows of each pass of a kind, padding not counted."""
        return [int((p.rows.seq_rows > 0).sum()) for p in self.backend.passes if p.kind is kind]
