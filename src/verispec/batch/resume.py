"""Samples that go on behind what they have committed before: to whoever reads them, as if nothing had happened.

The tokens of the earlier life come as one event, generation goes on behind them by `Request.committed_ids`, and the
output at the end is that of both. So everything that answers are made of (text, log-probabilities, digests, counts) is
the same as of a sample that was never stopped. A task says by `PROGRESS` what its requests go on from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from verispec.async_llm import AsyncLLM, Stream
from verispec.batch.journal import Commit, Sample
from verispec.engine import Request
from verispec.llm import LLM
from verispec.types import TokenEvent, TokenLogprobs


@dataclass(slots=True)
class Progress:
    """What the samples of one line have committed, by number: those of its second request follow those of the first."""

    samples: dict[int, Sample] = field(default_factory=dict)
    _told: dict[int, tuple[int, int]] = field(default_factory=dict)  # tokens and characters

    def __post_init__(self) -> None:
        self._told = {number: (len(sample), len(sample.text)) for number, sample in self.samples.items()}

    def news(self) -> Iterator[Commit]:
        """What was committed since the last time, or since it was made."""
        for number, sample in self.samples.items():
            at, num_chars = self._told.get(number, (0, 0))
            if len(sample) > at:
                self._told[number] = (len(sample), len(sample.text))
                yield Commit(number, at, sample.since(at), sample.text[num_chars:])


PROGRESS: ContextVar[Progress] = ContextVar("PROGRESS")


class _Life(NamedTuple):
    """A sample under way: what it has committed in all its lives, what of it before this one, what its client gave."""

    sample: Sample
    before: TokenLogprobs
    given_ids: tuple[int, ...]


class ResumingLLM(AsyncLLM):
    """An AsyncLLM whose requests go on from the `PROGRESS` of the task that opens them, and add to it.

    Last events add nothing: what goes on has not ended. Requests whose tokens depend on the load always begin anew.
    """

    def __init__(self, llm: LLM) -> None:
        super().__init__(llm)
        self._lives: dict[tuple[int, int], _Life] = {}

    def open(self, requests: Sequence[Request], *, max_pending: int | None = None) -> Stream:
        samples = PROGRESS.get().samples
        samples_of, resumed, start = [], [], 0
        for request in requests:
            n = request.params.n
            own = [samples.setdefault(start + i, Sample()) for i in range(n)] if _can_resume(request) else []
            samples_of.append(own)
            resumed.append(request.rest([sample.token_ids for sample in own]))
            start += n
        stream = super().open(resumed, max_pending=max_pending)
        for request_id, request, own in zip(stream.request_ids, requests, samples_of, strict=True):
            for i, sample in enumerate(own):
                before = sample.since(0)
                given_ids = tuple(request.committed_ids[i]) if request.committed_ids else ()
                self._lives[request_id, i] = _Life(sample, before, given_ids)
                if before:
                    pieces = (*[""] * (len(before) - 1), sample.text)
                    stream._put(TokenEvent(request_id, i, before, pieces))
        return stream

    def _deliver(self, events: list[TokenEvent]) -> None:
        super()._deliver([self._noted(event) for event in events])

    def _noted(self, event: TokenEvent) -> TokenEvent:
        """Add an event to what its sample has committed; the last one gets the output of all lives."""
        life = self._lives.get((event.request_id, event.sample_index))
        if life is None:
            return event
        if event.output is None:
            life.sample.extend(event.logprobs, event.text)
            return event
        del self._lives[event.request_id, event.sample_index]
        whole = TokenLogprobs.of((*life.before, *event.output.logprobs))
        return event._replace(output=replace(event.output, logprobs=whole, given_ids=life.given_ids))


def _can_resume(request: Request) -> bool:
    return request.params.deterministic and request.can_continue
