"""What is known of one request while replicas answer it: enough to go on elsewhere, to the bit, when one is lost.

Knows events and requests; nothing of replicas, sockets or Ray.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from verispec.engine import Request
from verispec.types import (
    FinishReason,
    SampleOutput,
    SequenceStats,
    TokenEvent,
    TokenLogprobs,
)

_LOST = (FinishReason.ERROR, FinishReason.ABORT)  # how a replica ends what it cannot finish


class _Sample:
    """One sample: what was committed in earlier attempts, and what in this one."""

    def __init__(self, given_ids: tuple[int, ...]) -> None:
        self.given_ids = given_ids
        self.before: list[TokenLogprobs] = []
        self.now: list[TokenLogprobs] = []
        self.output: SampleOutput | None = None

    @property
    def logprobs(self) -> TokenLogprobs:
        return TokenLogprobs.of(entry for part in (*self.before, *self.now) for entry in part)


class Journal:
    """A request, the tokens committed for it, and its outputs as one undisturbed replica would have given them.

    `take` turns what a replica says into what the client hears; `rest` is what another replica is to be asked then.
    `failure` says why this attempt cannot finish.
    """

    def __init__(self, request_id: int, request: Request) -> None:
        self.request_id = request_id
        self.request = request
        self.failure: str | None = None
        given = request.committed_ids or [()] * request.params.n
        first = request.first_sample
        self._samples = {first + i: _Sample(tuple(map(int, ids))) for i, ids in enumerate(given)}
        self._num_left = request.params.n

    @property
    def has_ended(self) -> bool:
        """Whether every sample has its output."""
        return not self._num_left

    @property
    def outputs(self) -> list[SampleOutput]:
        """The outputs there are, by sample."""
        return [sample.output for sample in self._samples.values() if sample.output is not None]

    @property
    def has_begun(self) -> bool:
        """Whether anything was committed."""
        return any(sample.before or sample.now for sample in self._samples.values())

    @property
    def can_move(self) -> bool:
        """Whether another replica can go on with it."""
        return not self.has_begun or self.request.can_continue

    def take(self, events: Iterable[TokenEvent]) -> list[TokenEvent]:
        """Note what a replica committed. Returns what is new of it to the client, under this request's id."""
        told = []
        for event in events:
            sample = self._samples[event.sample_index]
            if sample.output is not None:  # it ended in an earlier attempt
                continue
            output = event.output
            if output is not None and output.finish_reason in _LOST:
                self.failure = output.error or "the replica is stopping"
                continue
            if event.logprobs:
                sample.now.append(event.logprobs)
            if output is not None:
                self._num_left -= 1
                output = sample.output = self._joined(sample, output)
            told.append(event._replace(request_id=self.request_id, output=output))
        return told

    def rest(self) -> Request:
        """What is left to be asked. The attempt before is over: what it still says must not be taken any more."""
        self.failure = None
        for sample in self._samples.values():
            sample.before += sample.now
            sample.now = []
        return self.request.rest([sample.logprobs.token_ids for sample in self._samples.values()])

    def end(self, reason: FinishReason, error: str | None = None) -> list[TokenEvent]:
        """The last events of the samples that have none, for a request that nobody will finish."""
        told = []
        for index, sample in self._samples.items():
            if sample.output is not None:
                continue
            sample.output = SampleOutput(
                sample_index=index,
                prompt_len=len(self.request.prompt_ids),
                logprobs=sample.logprobs,
                text="",
                finish_reason=reason,
                seed=self.request.params.seed or 0,
                stats=SequenceStats(),
                error=error,
                given_ids=sample.given_ids,
            )
            told.append(TokenEvent(self.request_id, index, output=sample.output))
        self._num_left = 0
        return told

    def _joined(self, sample: _Sample, output: SampleOutput) -> SampleOutput:
        """The output as if one replica had drawn all of it. Counters and times are those of the last one."""
        if not sample.before:
            return output
        return replace(output, logprobs=sample.logprobs, given_ids=sample.given_ids)
