"""The events of a call as they come, and what all interfaces report of them. Knows not how answers are written."""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from verispec.async_llm import Stream
from verispec.engine import Request
from verispec.receipt import Receipt
from verispec.server.call import Call
from verispec.server.choices import Choice, Commit
from verispec.server.errors import ApiError, stopping
from verispec.server.prediction import num_accepted
from verispec.types import FinishReason, SampleOutput, TokenEvent

if TYPE_CHECKING:
    from verispec.server.core import Core

_ID_DIGITS = 24


class Answer:
    """The events of a call, and what came of them so far."""

    def __init__(self, core: Core, call: Call, stream: Stream, requests: Sequence[Request]) -> None:
        self.call = call
        self.core = core
        self.created = int(time.time())
        self.choices = [Choice(call.tools.reader()) for _ in range(call.num_choices)]
        self.receipts: dict[int, Receipt] = {}
        self._requests = requests
        self._stream = stream
        self._first = {request_id: i * call.params.n for i, request_id in enumerate(stream.request_ids)}
        self._seen = dict(call.skip)
        self._timer = core.after_timeout(stream.fail)
        stream.on_close = self._leave
        for i, ids in enumerate(call.extension.committed_ids or ()):
            for prompt_ids, choice in zip(call.prompts, self.choices[i :: call.params.n], strict=True):
                choice.go_on_behind(core.text_of(call, prompt_ids, ids))

    @property
    def seed(self) -> int:
        """The seed that gives this answer again."""
        assert self.call.params.seed is not None
        return self.call.params.seed

    @property
    def prompt_len(self) -> int:
        """Prompt tokens, of all prompts."""
        return sum(map(len, self.call.prompts))

    @property
    def num_generated(self) -> int:
        """Output tokens of all choices, those the client gave included."""
        return sum(len(self.given_ids(i)) + choice.num_tokens for i, choice in enumerate(self.choices))

    def given_ids(self, index: int) -> Sequence[int]:
        """Tokens of a choice that the client gave."""
        given = self.call.extension.committed_ids
        return given[index % self.call.params.n] if given else ()

    def begun_len(self, index: int) -> int:
        """Tokens of a choice that the client had before this answer began."""
        return len(self.given_ids(index)) + self.call.skip.get(index, 0)

    def id_of(self, index: int, item: int) -> str:
        """Hex digits for an item of a choice: the same for the same request, whoever answers it."""
        return hashlib.sha256(f"{self._id_seed} {index} {item}".encode()).hexdigest()

    @cached_property
    def _id_seed(self) -> str:
        return hashlib.sha256(repr((self.call.prompts, self.seed)).encode()).hexdigest()

    def call_id(self, index: int, item: int) -> str:
        """The id of a call, for its result to name."""
        digits, id_len = self.id_of(index, item), self.call.tools.format.id_len
        return f"call_{digits[:_ID_DIGITS]}" if id_len is None else digits[:id_len]

    async def commits(self) -> AsyncIterator[Iterator[Commit]]:
        """What becomes visible, step by step, to the end. Raises ApiError where it ends otherwise.

        Commits of a step are made as they are taken: whatever is written of the answer then says no more than they do.
        """
        try:
            while events := await self._stream.take():
                self.core.metrics.count_commits(events)
                commits = (commit for event in events if (commit := self._taken(event)) is not None)
                yield commits
                for _ in commits:  # that nobody took
                    pass
        finally:
            self.close()

    async def whole(self, written: Callable[[], Any]) -> Any:
        """`written()` at the end. Where it ends otherwise, the error holds what is written of it by then."""
        try:
            async for _ in self.commits():
                pass
        except ApiError as error:
            if self.num_generated:
                error.partial = written()
            raise
        return written()

    def close(self) -> None:
        """Abort what has not ended."""
        self._stream.close()

    def _leave(self) -> None:
        """Make room for others. Whoever writes this answer may be stuck with a client that does not read."""
        self._timer.cancel()
        if self.core.leave(self):
            self.core.metrics.count_aborted(sum(choice.output is None for choice in self.choices))

    def abort(self) -> None:
        """End it at once; whoever reads it is told."""
        self._stream.abort()

    def _taken(self, event: TokenEvent) -> Commit | None:
        """What the client is to hear of an event."""
        index = self._first[event.request_id] + event.sample_index
        choice, num_tokens = self.choices[index], len(event.logprobs)
        choice.take(event)
        end = len(self.given_ids(index)) + choice.num_tokens
        is_end = event.output is not None
        skip = min(self._seen.get(index, 0), num_tokens)
        is_known = 0 < skip == num_tokens
        if skip:
            self._seen[index] -= skip
            choice.read(event.pieces[:skip], is_end=is_end and is_known)
        pieces = event.pieces[skip:]
        parts = () if is_known else choice.read(pieces, is_end=is_end)
        if event.output is not None:
            self._ended(index, event.output)
        if is_known and not is_end:
            return None
        return Commit(index, event, event.logprobs[skip:], pieces, parts, end)

    def _ended(self, index: int, output: SampleOutput) -> None:
        self.core.metrics.count_end(output)
        if output.finish_reason is FinishReason.ERROR:
            raise ApiError(500, f"the engine failed: {output.error}", code="engine_error")
        if output.finish_reason is FinishReason.ABORT:
            raise stopping()
        if self.call.extension.receipt:
            request = self._requests[index // self.call.params.n]
            self.receipts[index] = self.core.receipt(request, output)
            self.core.metrics.receipts.inc()

    def extensions(self) -> dict[str, Any]:
        """`extension` of the only choice, or of all of them."""
        found = [self.extension(i) for i in range(len(self.choices))]
        return found[0] if len(found) == 1 else {**self.extension(), "choices": found}

    def extension(self, index: int | None = None) -> dict[str, Any]:
        """What only this server reports, of the whole answer or, at its end, of one choice."""
        found: dict[str, Any] = {"seed": self.seed, "profile": self.core.profile}
        if self.call.tools.skipped:
            found["skipped_tools"] = list(self.call.tools.skipped)
        if index is None:
            return found
        output = self.choices[index].output
        if output is None:
            return found
        stats = output.stats
        found["digest"] = output.digest
        if output.tokens_per_pass is not None:
            found["tokens_per_pass"] = _rounded(output.tokens_per_pass)
        if not stats.drafted:
            found["no_draft_reason"] = stats.no_draft_reason or stats.chosen_because
        if index in self.receipts:
            found["receipt"] = self.core.receipts.keep(self.receipts[index], self.call.tenant)
        return found

    def usage(self, num_generated: int | None = None) -> dict[str, Any]:
        """Tokens, as OpenAI counts them; all that were generated unless so many were told of so far."""
        num_generated = self.num_generated if num_generated is None else num_generated
        stats = [choice.output.stats for choice in self.choices if choice.output is not None]
        accepted, drafted = sum(s.accepted for s in stats), sum(s.drafted for s in stats)
        if predicted := self.call.prediction_ids:
            outputs = [choice.output for choice in self.choices if choice.output is not None]
            accepted = sum(num_accepted(predicted, (*o.given_ids, *o.token_ids)) for o in outputs)
            drafted = len(predicted) * len(outputs)
        return {
            "prompt_tokens": self.prompt_len,
            "completion_tokens": num_generated,
            "total_tokens": self.prompt_len + num_generated,
            "prompt_tokens_details": {"cached_tokens": self._num_cached},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            },
        }

    @property
    def _num_cached(self) -> int:
        """Prompt tokens that were found in the cache. What one sample of a prompt computes, the others find there."""
        n = self.call.params.n
        found = [choice.output.stats.cached_tokens if choice.output is not None else 0 for choice in self.choices]
        return sum(min(found[i : i + n]) for i in range(0, len(found), n))

    def metrics(self) -> dict[str, Any]:
        """Times and drafts, under vLLM's names; of the first choice where there are several."""
        choice = self.choices[0]
        if choice.output is None:
            return {}
        stats, num_tokens = choice.output.stats, choice.num_tokens
        first, last = stats.first_token_time, stats.last_token_time
        found: dict[str, Any] = {}
        if stats.start_time is not None:
            found["queue_time_ms"] = _rounded(1000 * (stats.start_time - stats.arrival_time))
        if first is not None and last is not None:
            seconds = last - first
            found["time_to_first_token_ms"] = _rounded(1000 * (first - stats.arrival_time))
            found["generation_time_ms"] = _rounded(1000 * seconds)
            if num_tokens > 1 and seconds > 0:
                found["mean_itl_ms"] = _rounded(1000 * seconds / (num_tokens - 1))
                found["tokens_per_second"] = _rounded((num_tokens - 1) / seconds)
        if choice.accepted_lens:
            found["speculative_decoding"] = _speculative(choice.accepted_lens, choice.draft_lens)
        return found


def _speculative(accepted: Sequence[int], drafted: Sequence[int]) -> dict[str, Any]:
    histogram = [0] * (max(drafted) + 1)
    for count in accepted:
        histogram[count] += 1
    return {
        "mean_acceptance_length": _rounded(1 + sum(accepted) / len(accepted)),
        "draft_acceptance_rate": _rounded(sum(accepted) / max(1, sum(drafted))),
        "acceptance_histogram": histogram,
        "num_spec_steps": len(accepted),
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": sum(drafted),
        "num_spec_tokens": max(drafted),
    }


def _rounded(value: float) -> float:
    return round(value, 3)
