"""The promise, shown on one request: it runs in every situation that might change its bits, and the bits are compared.

Every situation is an engine of its own on the weights of one LLM. The deterministic cases must all equal the first, the
request alone without drafts; the fast cases give the promise up and show what it is worth. What an engine did is taken
from its events and counters alone. Knows nothing of terminals: cases are values, given as they come.
"""

import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from verispec.backends.blas import LibraryRow, rows_beside_others
from verispec.engine import Engine, Request
from verispec.errors import InputError, VerispecError
from verispec.llm import LLM
from verispec.spec.registry import LOOKUP_DRAFTER, MODEL_DRAFTER, SKIP_DRAFTER
from verispec.spec.speculation import GRAMMAR, OFF, Speculation
from verispec.text.prompts import Prompt
from verispec.types import SampleOutput, SamplingParams, SequenceStats

ALONE, WARM, MIDDLE, FIRST, LAST = "alone", "warm cache", "amid a crowd", "first of crowd", "last of crowd"
PREEMPTED, CHUNKED, IN_BURSTS, AHEAD = "preempted", "small chunks", "in bursts", "two steps ahead"

_DRAFTED_IN_BURSTS = (LOOKUP_DRAFTER, SKIP_DRAFTER, MODEL_DRAFTER)
_MAX_CHUNKS = 64  # of a long prompt: more would take longer than they show
_STEPS_BETWEEN_ARRIVALS = 3
_HEAD_START = 16  # tokens that others may have before the request begins
_OTHER_TEXTS = (
    "Once upon a time there was a small village at the foot of a mountain, and",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3,",
    "The recipe needs two eggs, a cup of flour and",
    "Dear Sir or Madam, I am writing to you because",
)
_OTHER_TEMPERATURES = (0.0, 1.0, 0.7)


class Arrival(NamedTuple):
    """A request, and before which step of the engine it comes."""

    step: int
    request: Request


@dataclass(frozen=True, slots=True)
class Run:
    """What came of one request. `num_beside` is the most others that ran at once beside it."""

    output: SampleOutput
    num_beside: int
    num_steps_to_first: int  # from its arrival to its first token
    num_steps: int

    @property
    def stats(self) -> SequenceStats:
        return self.output.stats


@dataclass(frozen=True, slots=True)
class Case:
    """The request in one situation. `took_place` is False if that could not be brought about; `difference` is prose."""

    name: str
    drafter: str
    run: Run
    is_equal: bool
    took_place: bool
    difference: str


class Comparison(NamedTuple):
    """How one output differs from another. Log-probabilities are compared up to the first token that differs."""

    num_compared: int
    num_different: int
    first_different: int | None  # position in the output
    first_other_token: int | None
    largest_difference: float

    @property
    def is_equal(self) -> bool:
        return self.num_different == 0 and self.first_other_token is None


class FastCase(NamedTuple):
    """The request on fast passes, compared with the one that ran alone on them."""

    num_others: int
    run: Run
    comparison: Comparison


class _Situation(NamedTuple):
    """How a case is made: who arrives when, and in what engine. `found` says what happened, None if it did not."""

    name: str
    found: Callable[[Run], str | None]
    missing: str = ""
    arrivals: Callable[[Request], list[Arrival]] = lambda request: [Arrival(0, request)]
    drafter: str = OFF
    changes: Mapping[str, Any] = MappingProxyType({})  # of the engine's configuration
    is_streamed: bool = True

    def case(self, run: Run, reference: Run) -> Case:
        output, found = run.output, self.found(run)
        if output.error is not None:
            difference = f"failed: {output.error}"
        elif found is None and self.missing:
            difference = f"could not be brought about: {self.missing}"
        else:
            difference = ", ".join(part for part in (found, _drafts(self.drafter, run)) if part)
        is_equal = output.error is None and output.digest == reference.output.digest
        return Case(self.name, self.drafter, run, is_equal, found is not None, difference)


class Demonstration:
    """One request of one LLM, to be run in many situations beside up to `crowd` others. No stream may be open then."""

    def __init__(self, llm: LLM, prompt: Prompt, params: SamplingParams, *, crowd: int = 7) -> None:
        if params.seed is None or params.n != 1:
            raise InputError("a demonstration needs a seed and one sample: the same request is run many times")
        if crowd < 1:
            raise InputError(f"crowd must be at least 1, not {crowd}")
        self._llm = llm
        self._request = llm.request(prompt, replace(params, deterministic=True), drafter=OFF)
        self._others = [self._other(i) for i in range(crowd + 1)]
        self._crowd = self._others[:crowd]
        idle = (OFF,) if self._request.grammar is not None else (OFF, GRAMMAR)
        self._drafters = [name for name in llm.drafter_names if name not in idle]
        self._in_bursts = [OFF, *(name for name in self._drafters if name in _DRAFTED_IN_BURSTS)]
        # One other, half the crowd, all of it; and one more, as a library may compute the row behind a block apart.
        self._crowd_sizes = sorted({1, max(1, crowd // 2), crowd, crowd + 1})
        self.num_prompt_tokens = len(self._request.prompt_ids)
        self.num_cases = 8 + len(self._in_bursts) + 2 * len(self._drafters)
        self.num_fast_cases = 1 + len(self._crowd_sizes)

    @property
    def has_only_pure_passes(self) -> bool:
        """Whether all passes are row-pure by construction, fast ones too: then no fast case can differ."""
        return self._llm.calibration.wrong_answers is not None

    def cases(self) -> Iterator[Case]:
        """The deterministic cases, the reference first. All of them should be equal to it."""
        with self._llm.separate_engine(prefix_cache=True, max_burst=1) as engine:
            reference, warm = (_run(engine, [Arrival(0, self._request)], self._request) for _ in range(2))
        if reference.output.error is not None:
            raise VerispecError(reference.output.error)
        yield _Situation(ALONE, lambda run: "nothing: this is the reference").case(reference, reference)
        yield _Situation(WARM, _was_cached, "nothing cached").case(warm, reference)
        for situation in self._situations(reference):
            speculation = Speculation(situation.drafter)
            request = replace(self._request, speculation=speculation, is_streamed=situation.is_streamed)
            with self._llm.separate_engine(**situation.changes) as engine:
                run = _run(engine, situation.arrivals(request), request)
            yield situation.case(run, reference)

    def fast_cases(self) -> Iterator[FastCase]:
        """The request on fast passes, alone and then in ever larger crowds that run on fast passes too.

        Where every shape is canonical there would be none: these engines do without the smallest one.
        """
        request = _fast(self._request)
        family = self._llm.calibration.family
        alone: Run | None = None
        for num_others in (0, *self._crowd_sizes):
            others = [Arrival(0, _fast(other)) for other in self._others[:num_others]]
            with self._llm.separate_engine(family=family[1:] or family) as engine:
                run = _run(engine, [*others, Arrival(0, request)], request)
            alone = alone or run
            yield FastCase(num_others, run, compare(run.output, alone.output))

    def library_rows(self) -> list[LibraryRow]:
        """What a crowd of these sizes does to a row where a library multiplies, by a matrix of this model's size."""
        arch = self._llm.architecture
        return rows_beside_others(arch.mlp_size, arch.hidden_size, self._crowd_sizes)

    def _situations(self, reference: Run) -> Iterator[_Situation]:
        first, crowd = reference.num_steps_to_first, [Arrival(0, other) for other in self._crowd]

        def in_crowd(name: str, arrivals: Callable[[Request], list[Arrival]], drafter: str = OFF) -> _Situation:
            return _Situation(name, _had_company, "nothing ran beside it", arrivals, drafter)

        def was_cut_otherwise(run: Run) -> str | None:
            return f"prompt in {run.num_steps_to_first} passes" if run.num_steps_to_first != first else None

        yield in_crowd(MIDDLE, self._middle)
        yield in_crowd(FIRST, lambda request: [Arrival(0, request), *crowd])
        yield in_crowd(LAST, lambda request: [*reversed(crowd), Arrival(4, request)])
        yield self._preempted(reference)
        # The smallest canonical shape that cuts the prompt into a bearable number of chunks.
        shapes = self._llm.calibration.family
        budget = min((m for m in shapes if m * _MAX_CHUNKS >= self.num_prompt_tokens), default=max(shapes))
        uncut = "the prompt was not cut otherwise"
        yield _Situation(CHUNKED, was_cut_otherwise, uncut, changes={"row_budget": budget})
        alone = "every pass was a step of its own"
        for name in self._in_bursts:
            changes = {"max_burst": 8}
            yield _Situation(IN_BURSTS, _ran_ahead, alone, drafter=name, changes=changes, is_streamed=False)
        yield _Situation(AHEAD, _ran_ahead, alone, changes={"max_burst": 3, "depth": 2}, is_streamed=False)
        for name in self._drafters:
            yield _Situation(ALONE, lambda run: "" if run.stats.drafted else None, drafter=name)
        for name in self._drafters:
            yield in_crowd(MIDDLE, self._middle, name)

    def _preempted(self, reference: Run) -> _Situation:
        """One older request, whose growth takes the slots of this one: the youngest gives way.

        There are slots for this request alone, and no cache: what is taken from it has to be computed again.
        """
        num_output = len(reference.output.token_ids)
        num_slots = self.num_prompt_tokens + num_output
        room = min(max(2, num_output // 2), num_slots - 1)
        params = SamplingParams(max_tokens=num_output + self.num_prompt_tokens // 32 + 1, seed=1, ignore_eos=True)
        older = self._llm.request(self._text_ids(0)[:room], params, drafter=OFF)
        return _Situation(
            PREEMPTED,
            _was_preempted,
            "it was not preempted",
            arrivals=lambda request: [Arrival(0, older), Arrival(0, request)],
            changes={"num_slots": num_slots, "max_len": num_slots, "prefix_cache": False},
        )

    def _middle(self, request: Request) -> list[Arrival]:
        """Half of the crowd is there, the other half comes one by one while the request runs."""
        half = (len(self._crowd) + 1) // 2
        before = [Arrival(0, other) for other in self._crowd[:half]]
        later = [Arrival(4 + _STEPS_BETWEEN_ARRIVALS * i, other) for i, other in enumerate(self._crowd[half:])]
        return [*before, Arrival(2, request), *later]

    def _other(self, index: int) -> Request:
        """A request for the crowd: its own text, or one that shares half or all of the prompt."""
        prompt_ids = list(self._request.prompt_ids)
        own_ids = self._text_ids(index)
        half_ids = prompt_ids[: len(prompt_ids) // 2] + own_ids
        max_tokens = self._request.params.max_tokens
        params = SamplingParams(
            max_tokens=None if max_tokens is None else 2 * max_tokens + _HEAD_START,  # it outlives the request
            temperature=_OTHER_TEMPERATURES[index % len(_OTHER_TEMPERATURES)],
            seed=index + 1,
            ignore_eos=True,
            deterministic=index % 2 == 0,
        )
        ids = (own_ids, half_ids, prompt_ids)[index % 3][: self._llm.max_len - 1]
        names = self._llm.drafter_names
        return self._llm.request(ids, params, drafter=names[index % len(names)])

    def _text_ids(self, index: int) -> list[int]:
        token_ids = self._llm.tokenizer.encode(_OTHER_TEXTS[index % len(_OTHER_TEXTS)])
        return token_ids or list(self._request.prompt_ids)  # a tiny vocabulary may know none of the letters


def compare(output: SampleOutput, other: SampleOutput) -> Comparison:
    """How `output` differs from `other`, bit by bit."""
    pairs = list(zip(output.logprobs, other.logprobs, strict=False))
    split = next((i for i, (a, b) in enumerate(pairs) if a.token_id != b.token_id), len(pairs))
    same_tokens = split == len(output.logprobs) == len(other.logprobs)
    values = [(a.logprob, b.logprob) for a, b in pairs[:split]]
    different = [i for i, (a, b) in enumerate(values) if struct.pack("<f", a) != struct.pack("<f", b)]
    return Comparison(
        num_compared=split,
        num_different=len(different),
        first_different=different[0] if different else None,
        first_other_token=None if same_tokens else split,
        largest_difference=max((abs(a - b) for a, b in values), default=0.0),
    )


def _run(engine: Engine, arrivals: Sequence[Arrival], request: Request) -> Run:
    """Let everybody arrive and run until `request`, one of them, has ended; then abort the others."""
    coming = deque(arrivals)
    request_ids: list[int] = []
    own_id, step = -1, 0
    arrived_at, first_at, num_beside = 0, None, 0
    while True:
        while coming and coming[0].step <= step:
            arrival = coming.popleft()
            request_ids.append(engine.add(arrival.request))
            if arrival.request is request:
                own_id, arrived_at = request_ids[-1], step
        events = [event for event in engine.step() if event.request_id == own_id]
        step += 1
        output = next((event.output for event in events if event.output is not None), None)
        first_at = step if first_at is None and events else first_at
        if own_id >= 0:
            num_beside = max(num_beside, engine.num_running - (output is None))  # less itself, unless it has just ended
        if output is not None:
            for request_id in request_ids:
                engine.abort(request_id)
            while engine.has_work:
                engine.step()
            return Run(output, num_beside, (first_at or step) - arrived_at, step)


def _fast(request: Request) -> Request:
    return replace(request, params=replace(request.params, deterministic=False), speculation=Speculation(OFF))


def _was_cached(run: Run) -> str | None:
    cached = run.stats.cached_tokens
    return f"{cached} of {run.output.prompt_len} prompt tokens from the cache" if cached else None


def _had_company(run: Run) -> str | None:
    return f"{run.num_beside} beside it" if run.num_beside else None


def _was_preempted(run: Run) -> str | None:
    times = run.stats.preemptions
    return f"preempted {'once' if times == 1 else f'{times} times'}, computed again" if times else None


def _ran_ahead(run: Run) -> str | None:
    return f"{run.stats.passes} passes in {run.num_steps} steps" if run.num_steps < run.stats.passes else None


def _drafts(drafter: str, run: Run) -> str:
    stats = run.stats
    if drafter == OFF:
        return ""
    if stats.drafted:
        return f"drafts {stats.accepted}/{stats.drafted} accepted"
    reason = (stats.no_draft_reason or "").partition(";")[0]  # not what to do about it
    return f"nothing drafted ({reason})" if reason else "nothing drafted"
