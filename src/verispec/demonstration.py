"""The promise, shown on one request: it runs in every situation that might change its bits, and the bits are compared.

Every situation is an engine of its own on the weights of one LLM. The deterministic cases must all equal the first, the
request alone without drafts; the fast cases give the promise up and show what it is worth. Where they cannot differ, as
on the native backend, `library_rows` shows how arithmetic that is not row-pure does. Nothing here knows of terminals:
cases are values, given as they come. What an engine did is taken from its events and counters alone.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from verispec.backends.blas import LibraryRow, rows_beside_others
from verispec.engine import Engine, Request
from verispec.errors import InputError, VerispecError
from verispec.llm import LLM
from verispec.prompts import Prompt
from verispec.spec.registry import MODEL_DRAFTER, SKIP_DRAFTER
from verispec.spec.speculation import Speculation
from verispec.types import SampleOutput, SamplingParams

REFERENCE_DRAFTER = "none"
ALONE, WARM, MIDDLE, FIRST, LAST = "alone", "warm cache", "amid a crowd", "first of crowd", "last of crowd"
PREEMPTED, CHUNKED, IN_BURSTS, AHEAD = "preempted", "small chunks", "in bursts", "two steps ahead"

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


@dataclass(frozen=True, slots=True)
class Case:
    """The request in one situation. `took_place` is False if the situation could not be brought about."""

    name: str
    drafter: str
    run: Run
    is_equal: bool
    took_place: bool

    @property
    def digest(self) -> str:
        """SHA-256 over output ids and log-probabilities."""
        return self.run.output.digest


@dataclass(frozen=True, slots=True)
class Comparison:
    """How one output differs from another. Log-probabilities are compared up to the first token that differs."""

    num_compared: int
    num_different: int
    first_different: int | None  # position in the output
    first_other_token: int | None
    largest_difference: float

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        return self.num_different == 0 and self.first_other_token is None


@dataclass(frozen=True, slots=True)
class FastCase:
    """The request on fast passes, compared with the one that ran alone on them."""

    num_others: int
    run: Run
    comparison: Comparison


def _no_changes(reference: Run) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class _Situation:
    """How a case is made: who arrives when, in what engine, and how to tell afterwards that it took place."""

    name: str
    arrivals: Callable[[Request, Run], list[Arrival]]
    took_place: Callable[[Run, Run], bool]
    drafter: str = REFERENCE_DRAFTER
    changes: Callable[[Run], dict[str, Any]] = _no_changes
    is_streamed: bool = True


class Demonstration:
    """One request of one LLM, to be run in many situations beside up to `crowd` others. No stream may be open then."""

    def __init__(self, llm: LLM, prompt: Prompt, params: SamplingParams, *, crowd: int = 7) -> None:
        if params.seed is None or params.n != 1:
            raise InputError("a demonstration needs a seed and one sample: the same request is run many times")
        if crowd < 1:
            raise InputError(f"crowd must be at least 1, not {crowd}")
        self._llm = llm
        self._request = llm.request(prompt, replace(params, deterministic=True), drafter=REFERENCE_DRAFTER)
        self._others = [self._other(i) for i in range(crowd + 1)]
        self._crowd = self._others[:crowd]
        self._situations = self._all_situations()

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self._request.prompt_ids)

    @property
    def num_cases(self) -> int:
        """How many `cases` there will be."""
        return 2 + len(self._situations)

    @property
    def num_fast_cases(self) -> int:
        """How many `fast_cases` there will be."""
        return 1 + len(self._crowd_sizes())

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
        yield Case(ALONE, REFERENCE_DRAFTER, reference, is_equal=True, took_place=True)
        is_warm = warm.output.stats.cached_tokens > 0
        yield Case(WARM, REFERENCE_DRAFTER, warm, is_equal=_is_equal(warm, reference), took_place=is_warm)
        for situation in self._situations:
            request = replace(
                self._request, speculation=Speculation(situation.drafter), is_streamed=situation.is_streamed
            )
            with self._llm.separate_engine(**situation.changes(reference)) as engine:
                run = _run(engine, situation.arrivals(request, reference), request)
            yield Case(
                situation.name,
                situation.drafter,
                run,
                is_equal=_is_equal(run, reference),
                took_place=situation.took_place(run, reference),
            )

    def fast_cases(self) -> Iterator[FastCase]:
        """The request on fast passes, alone and then in ever larger crowds that run on fast passes too."""
        request = _fast(self._request)
        alone: Run | None = None
        for num_others in (0, *self._crowd_sizes()):
            others = [Arrival(0, _fast(other)) for other in self._others[:num_others]]
            with self._llm.separate_engine() as engine:
                run = _run(engine, [*others, Arrival(0, request)], request)
            alone = alone or run
            yield FastCase(num_others, run, compare(run.output, alone.output))

    def library_rows(self) -> list[LibraryRow]:
        """What a crowd of these sizes does to a row where a library multiplies, by a matrix of this model's size."""
        arch = self._llm.architecture
        return rows_beside_others(arch.mlp_size, arch.hidden_size, self._crowd_sizes())

    def _all_situations(self) -> list[_Situation]:
        drafters = [name for name in self._llm.drafter_names if name != REFERENCE_DRAFTER]
        in_bursts = [REFERENCE_DRAFTER, *(name for name in drafters if name in (SKIP_DRAFTER, MODEL_DRAFTER))]
        return [
            _Situation(MIDDLE, self._middle, _had_company),
            _Situation(FIRST, self._first, _had_company),
            _Situation(LAST, self._last, _had_company),
            _Situation(PREEMPTED, self._behind_an_older, _was_preempted, changes=self._scarce_slots),
            _Situation(CHUNKED, _only, _was_cut_otherwise, changes=self._small_chunks),
            *(
                _Situation(IN_BURSTS, _only, _ran_by_itself, drafter=name, changes=_bursts, is_streamed=False)
                for name in in_bursts
            ),
            _Situation(AHEAD, _only, _took_fewer_steps, changes=_two_ahead, is_streamed=False),
            *(_Situation(ALONE, _only, _had_drafts, drafter=name) for name in drafters),
            *(_Situation(MIDDLE, self._middle, _had_company, drafter=name) for name in drafters),
        ]

    def _crowd_sizes(self) -> list[int]:
        """One other, half the crowd, all of it; and one more, as a library may compute the row behind a block apart."""
        crowd = len(self._crowd)
        return sorted({1, max(1, crowd // 2), crowd, crowd + 1})

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
        text = _OTHER_TEXTS[index % len(_OTHER_TEXTS)]
        token_ids = self._llm.tokenizer.encode(text)
        return token_ids or list(self._request.prompt_ids)  # a tiny vocabulary may know none of the letters

    def _middle(self, request: Request, reference: Run) -> list[Arrival]:
        """Half of the crowd is there, the other half comes one by one while the request runs."""
        half = (len(self._crowd) + 1) // 2
        later = enumerate(self._crowd[half:])
        return [
            *(Arrival(0, other) for other in self._crowd[:half]),
            Arrival(2, request),
            *(Arrival(4 + _STEPS_BETWEEN_ARRIVALS * i, other) for i, other in later),
        ]

    def _first(self, request: Request, reference: Run) -> list[Arrival]:
        return [Arrival(0, request), *(Arrival(0, other) for other in self._crowd)]

    def _last(self, request: Request, reference: Run) -> list[Arrival]:
        return [*(Arrival(0, other) for other in reversed(self._crowd)), Arrival(4, request)]

    def _behind_an_older(self, request: Request, reference: Run) -> list[Arrival]:
        """One older request, whose growth takes the slots of this one: the youngest gives way."""
        num_output = len(reference.output.token_ids)
        room = min(max(2, num_output // 2), self._num_scarce_slots(reference) - 1)
        params = SamplingParams(max_tokens=num_output + self.num_prompt_tokens // 32 + 1, seed=1, ignore_eos=True)
        older = self._llm.request(self._text_ids(0)[:room], params, drafter=REFERENCE_DRAFTER)
        return [Arrival(0, older), Arrival(0, request)]

    def _scarce_slots(self, reference: Run) -> dict[str, Any]:
        """Slots for this request alone; no cache, so that what is taken from it has to be computed again."""
        num_slots = self._num_scarce_slots(reference)
        return {"num_slots": num_slots, "max_len": num_slots, "prefix_cache": False}

    def _num_scarce_slots(self, reference: Run) -> int:
        return self.num_prompt_tokens + len(reference.output.token_ids)

    def _small_chunks(self, reference: Run) -> dict[str, Any]:
        """The smallest canonical shape that cuts the prompt into a bearable number of chunks."""
        shapes = self._llm.calibration.family
        bearable = [m for m in shapes if m * _MAX_CHUNKS >= self.num_prompt_tokens]
        return {"row_budget": min(bearable, default=max(shapes))}


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


def _run(engine: Engine, arrivals: Iterable[Arrival], request: Request) -> Run:
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
            _abort(engine, request_ids)
            return Run(
                output, num_beside=num_beside, num_steps_to_first=(first_at or step) - arrived_at, num_steps=step
            )


def _abort(engine: Engine, request_ids: Iterable[int]) -> None:
    for request_id in request_ids:
        engine.abort(request_id)
    while engine.has_work:
        engine.step()


def _fast(request: Request) -> Request:
    return replace(
        request, params=replace(request.params, deterministic=False), speculation=Speculation(REFERENCE_DRAFTER)
    )


def _only(request: Request, reference: Run) -> list[Arrival]:
    return [Arrival(0, request)]


def _is_equal(run: Run, reference: Run) -> bool:
    return run.output.error is None and run.output.digest == reference.output.digest


def _had_company(run: Run, reference: Run) -> bool:
    return run.num_beside > 0


def _was_preempted(run: Run, reference: Run) -> bool:
    return run.output.stats.preemptions > 0


def _was_cut_otherwise(run: Run, reference: Run) -> bool:
    return run.num_steps_to_first != reference.num_steps_to_first


def _bursts(reference: Run) -> dict[str, Any]:
    """The backend runs up to so many rounds by itself."""
    return {"max_burst": 8}


def _two_ahead(reference: Run) -> dict[str, Any]:
    """The next rounds are submitted before the last ones are read."""
    return {"max_burst": 3, "depth": 2}


def _ran_by_itself(run: Run, reference: Run) -> bool:
    return run.num_steps < run.output.stats.passes


def _took_fewer_steps(run: Run, reference: Run) -> bool:
    return run.num_steps < reference.num_steps


def _had_drafts(run: Run, reference: Run) -> bool:
    return run.output.stats.drafted > 0
