"""From a client's fields to the engine and back: every interface is an adapter over this.

A *call* is what one HTTP request asks of the engine: some prompts, and parameters for all of them. An *answer* is its
events as they come, with what all interfaces report of it. Knows nothing of HTTP or of how answers are written.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeVar

from verispec.async_llm import AsyncLLM, Stream
from verispec.constraints import library_version
from verispec.engine import Request
from verispec.errors import InputError, QueueFullError, VerispecError
from verispec.llm import LLM
from verispec.receipt import Receipt
from verispec.receipt.values import check_recordable
from verispec.sampling.constraint import Grammar
from verispec.server.api import Extension, Sampling, Speculative
from verispec.server.choices import Choice, Commit
from verispec.server.errors import ApiError
from verispec.server.metrics import Metrics
from verispec.server.prediction import num_accepted
from verispec.server.receipts import ReceiptStore
from verispec.server.settings import Settings
from verispec.server.tool_use import ToolUse
from verispec.strict_json import numbered
from verispec.text.detokenizer import TextStream
from verispec.types import MAX_SEED_BITS, FinishReason, SampleOutput, SamplingParams, TokenEvent

T = TypeVar("T")
FINGERPRINT_DIGITS = 16
_ID_DIGITS = 24
INLINE_CHARS = 20_000  # longer texts are tokenised on another thread, so that streams go on meanwhile


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What one HTTP request asks of the engine. `params.seed` is never None. `skip` are tokens, by choice, that the
    client has seen: they are drawn again, and not told. `shown_ids` are control tokens that have text. `cache_salt`
    keeps its cached prefixes apart from others of the tenant.
    """

    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    extension: Extension
    tenant: str
    keeps_stop: bool = False
    skip: Mapping[int, int] = field(default_factory=dict)
    tools: ToolUse = field(default_factory=ToolUse)
    grammar: Grammar | None = None  # what `params` say of the answer, compiled
    prediction_ids: Sequence[int] = ()
    shown_ids: Sequence[int] = ()
    cache_salt: str | None = None

    @property
    def salt(self) -> str:
        """What requests must have in common to share cached prefixes. No tenant's name has a space."""
        return self.tenant if self.cache_salt is None else f"{self.tenant} {self.cache_salt}"

    @property
    def num_choices(self) -> int:
        """Samples of all prompts together."""
        return len(self.prompts) * self.params.n


class Work(Protocol):
    """What counts against the server's limits."""

    def abort(self) -> None:
        """End it at once; whoever waits for it is told."""


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
            text = core.text_of(call, ids)
            for choice in self.choices[i :: call.params.n]:
                choice.reader.read(text)

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

    async def commits(self) -> AsyncIterator[list[Commit]]:
        """What becomes visible, step by step, to the end. Raises ApiError where it ends otherwise."""
        try:
            while events := await self._stream.take():
                self.core.metrics.count_commits(events)
                yield [commit for event in events if (commit := self._taken(event)) is not None]
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
        self.core.leave(self)

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
        if stats.passes or stats.fast_passes:
            found["tokens_per_pass"] = _rounded(_tokens_per_pass(output))
        if not stats.drafted:
            found["no_draft_reason"] = stats.no_draft_reason or stats.chosen_because
        if index in self.receipts:
            found["receipt"] = self.core.receipts.keep(self.receipts[index], self.call.tenant)
        return found

    def usage(self) -> dict[str, Any]:
        """Tokens, as OpenAI counts them."""
        stats = [choice.output.stats for choice in self.choices if choice.output is not None]
        accepted, drafted = sum(s.accepted for s in stats), sum(s.drafted for s in stats)
        if predicted := self.call.prediction_ids:
            outputs = [choice.output for choice in self.choices if choice.output is not None]
            accepted = sum(num_accepted(predicted, (*o.given_ids, *o.token_ids)) for o in outputs)
            drafted = len(predicted) * len(outputs)
        return {
            "prompt_tokens": self.prompt_len,
            "completion_tokens": self.num_generated,
            "total_tokens": self.prompt_len + self.num_generated,
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


class Core:
    """The engine with everything that requests to it share."""

    def __init__(self, llm: LLM, settings: Settings, *, engine: AsyncLLM | None = None) -> None:
        self.llm = llm
        self.settings = settings
        self.names = settings.served_names or (llm.identity.name,)
        self.started = int(time.time())
        self.metrics = Metrics(settings.metrics_prefix, llm.status)
        self.receipts = ReceiptStore(settings.max_receipts)
        self.is_draining = False
        self.profile = llm.profile  # a hash, made anew whenever it is asked for
        self.fingerprint = _fingerprint(llm)
        self._async = engine or AsyncLLM(llm)
        self._work: dict[Work, int] = {}

    @property
    def num_samples(self) -> int:
        """Samples that run or wait."""
        return sum(self._work.values())

    def num_of(self, kind: type[Work]) -> int:
        """Pieces of work of this kind."""
        return sum(isinstance(work, kind) for work in self._work)

    @property
    def failure(self) -> str | None:
        """Why the engine takes no more requests, if it does not."""
        try:
            self.llm.thread.check_open()
        except VerispecError as error:
            return str(error)
        return None

    def silent_seconds(self) -> float:
        """How long nothing was heard of the requests that are open; 0 if none is."""
        return self._async.silent_seconds()

    def start(self, call: Call) -> Answer:
        """Hand a call to the engine. Raises what is wrong with it, and QueueFullError when there is no room."""
        settings = self.settings
        if call.num_choices > settings.max_samples:
            raise InputError(f"prompt and n ask for {call.num_choices} samples; at most {settings.max_samples} fit")
        self.check_room(call.num_choices)
        requests = [self._request(call, ids) for ids in call.prompts]
        answer = Answer(self, call, self._async.open(requests, max_pending=settings.max_pending), requests)
        self.enter(answer, call.num_choices)
        return answer

    def check_room(self, num_samples: int = 1) -> None:
        """Raise unless so many more samples can be taken now."""
        if self.is_draining:
            raise ApiError(503, "the server is stopping", code="stopping")
        if self.num_samples + num_samples > self.settings.max_samples:
            self.metrics.refused.inc()
            raise QueueFullError(f"{self.num_samples} samples run or wait already; try again later")

    def open(self, requests: Sequence[Request]) -> Stream:
        """A stream over requests that are nobody's answer."""
        return self._async.open(requests)

    def receipt(self, request: Request, output: SampleOutput) -> Receipt:
        """The receipt of an answer, signed where there is a key."""
        found, key = self.llm.receipt_of(request, output), self.settings.signing_key
        return found if key is None else key.sign(found)

    def enter(self, work: Work, num_samples: int) -> None:
        """Count work as so many samples, until it leaves."""
        self._work[work] = num_samples

    def leave(self, work: Work) -> None:
        """It has come to its end."""
        self._work.pop(work, None)

    def after_timeout(self, fail: Callable[[ApiError], None]) -> asyncio.TimerHandle:
        """Call `fail` when a piece of work has taken as long as one may."""
        seconds = self.settings.timeout
        error = ApiError(504, f"the answer was not complete after {seconds:g} seconds", code="timeout")
        return asyncio.get_running_loop().call_later(seconds, fail, error)

    def drain(self) -> None:
        """Take nothing more."""
        self.is_draining = True

    def abort_all(self) -> None:
        """End every request; whoever waits for one is told."""
        for work in list(self._work):
            work.abort()

    def check_model(self, name: str | None) -> str:
        """The name a client used, or the first one. Raises 404 for a name that is not served."""
        if name is None or name in self.names:
            return name or self.names[0]
        shown = name[:100]
        message = f"the model {shown!r} is not served here; served: {', '.join(self.names)}"
        raise ApiError(404, message, param="model", code="model_not_found")

    async def tokenised(self, make: Callable[[], T], num_chars: int) -> T:
        """`make()`, on another thread if it will take long."""
        return make() if num_chars < INLINE_CHARS else await asyncio.to_thread(make)

    def text_of(self, call: Call, token_ids: Sequence[int]) -> str:
        """The text that these tokens release at the beginning of a call's answer."""
        stream = self._text_stream(call)
        return "".join(stream.push(token_id).text for token_id in token_ids)

    def _text_stream(self, call: Call) -> TextStream:
        tokenizer, shown = self.llm.tokenizer, (*call.tools.shown_ids, *call.shown_ids)
        return TextStream(tokenizer, call.params.stop, keeps_stop=call.keeps_stop, shown_ids=shown)

    def _request(self, call: Call, prompt_ids: Sequence[int]) -> Request:
        params, asked = call.params, call.extension
        if asked.receipt:
            check_recordable(params)
        return Request(
            prompt_ids=prompt_ids,
            params=params,
            speculation=self.llm.chosen(None, _speculation(asked.speculative)),
            is_traced=asked.trace,
            eos_ids=self.llm.tokenizer.eos_ids,
            text=lambda: self._text_stream(call),
            committed_ids=asked.committed_ids or (),
            salt=call.salt,
            grammar=call.grammar,
            prediction_ids=call.prediction_ids,
        )


def stopping() -> ApiError:
    """What is told of work that the server ends because it is stopping."""
    return ApiError(503, "the server ended the request: it is stopping", code="aborted")


def sampling_params(
    body: Sampling, extension: Extension | None, defaults: Mapping[str, Any], **instead: Any
) -> SamplingParams:
    """The parameters that a client's fields mean, with a seed in any case. `instead` goes above them, by name."""
    named = {
        name: getattr(body, name)
        for name in (
            "max_tokens", "min_tokens", "ignore_eos", "temperature", "top_p", "min_p", "presence_penalty",
            "frequency_penalty", "repetition_penalty", "n", "seed", "prompt_logprobs",
        )
    }  # fmt: skip
    named["top_k"] = None if body.top_k is None else max(0, body.top_k)
    named["stop"] = None if body.stop is None else [body.stop] if isinstance(body.stop, str) else body.stop
    named["stop_ids"] = body.stop_token_ids
    named["logit_bias"] = None if body.logit_bias is None else numbered(body.logit_bias, name="logit_bias")
    named["deterministic"] = None if extension is None else extension.deterministic
    chosen = {"temperature": 1.0, **defaults}
    chosen |= {name: value for name, value in {**named, **instead}.items() if value is not None}
    chosen.setdefault("max_tokens", None)
    chosen.setdefault("seed", secrets.randbits(MAX_SEED_BITS))
    return SamplingParams.from_mapping(chosen)


def _speculation(asked: bool | Speculative | None) -> Any:
    """As the library takes it. vLLM's number of tokens is a chain of that length."""
    if not isinstance(asked, Speculative):
        return asked
    chosen = {name: getattr(asked, name) for name in ("method", "tree", "accept") if getattr(asked, name) is not None}
    if asked.num_speculative_tokens is not None:
        chosen.setdefault("tree", f"chain:{asked.num_speculative_tokens}")
    return chosen


def _fingerprint(llm: LLM) -> str:
    """Equal for servers whose answers are equal, also to the rest of an answer that another one began: a hash of the
    numeric profile, of the model's files and template, and of the library that follows constraints.
    """
    files = [file.sha256 for file in llm.identity.files]
    parts = [llm.profile, *files, llm.tokenizer.chat_template or "", library_version()]
    return "vs-" + hashlib.sha256("\n".join(parts).encode()).hexdigest()[:FINGERPRINT_DIGITS]


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


def _tokens_per_pass(output: SampleOutput) -> float:
    return len(output.logprobs) / max(1, output.stats.passes + output.stats.fast_passes)


def _rounded(value: float) -> float:
    return round(value, 3)
