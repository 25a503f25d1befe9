"""The Python interface: a model, an engine and a tokenizer behind `generate`, `stream`, `chat` and `score`.

Everything here is assembly; what decides tokens lives in the engine, which runs on a thread of its own and serves all
calls, from any number of threads, as one batch.
"""

from __future__ import annotations

import gc
import math
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, overload

from verispec.arguments import check_int
from verispec.constraints import library_version
from verispec.engine import Request
from verispec.engine.request import Predicted, new_batch
from verispec.engine.thread import Inbox
from verispec.errors import InputError, NumericError
from verispec.receipt.values import Receipt, check_recordable, make_receipt
from verispec.runtime import Message, Runtime
from verispec.spec.registry import MODEL_DRAFTER, default_method
from verispec.spec.speculation import AUTO, Speculation
from verispec.text.detokenizer import answer_text
from verispec.text.prompts import Params, Prediction, Prompt, PromptSpec, pair, spec
from verispec.types import (
    MAX_ALTERNATIVES,
    Draft,
    FinishReason,
    SampleOutput,
    SamplingParams,
    SequenceStats,
    TokenEvent,
    TokenLogprob,
    TokenLogprobs,
)

Speculative = Mapping[str, Any] | bool | None


@dataclass(frozen=True, slots=True, repr=False)
class Completion:
    """All samples of one prompt, with what is needed to get them again. The short names speak of sample 0.

    `receipts` are those that were asked for, one per sample; a sample that failed has none. Two are equal if prompt,
    profile and what was generated are: seeds, times, counters and receipts are not compared.
    """

    prompt_ids: tuple[int, ...]
    samples: tuple[SampleOutput, ...]
    profile: str
    receipts: tuple[Receipt, ...] = field(default=(), compare=False)

    def __repr__(self) -> str:
        more = f", samples={len(self.samples)}" if len(self.samples) > 1 else ""
        return f"Completion({self.samples[0].summary}{more})"

    @property
    def text(self) -> str:
        """The generated text, without EOS and without the stop string."""
        return self.samples[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The generated tokens, the stopping one included."""
        return self.samples[0].token_ids

    @property
    def logprobs(self) -> TokenLogprobs:
        """One entry per generated token."""
        return self.samples[0].logprobs

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """One entry per prompt token after the first, if they were asked for."""
        return self.samples[0].prompt_logprobs

    @property
    def finish_reason(self) -> FinishReason:
        """Why generation ended."""
        return self.samples[0].finish_reason

    @property
    def error(self) -> str | None:
        """What went wrong, if the finish reason is `error`."""
        return self.samples[0].error

    @property
    def seed(self) -> int:
        """The seed that gives this output again."""
        return self.samples[0].seed

    @property
    def digest(self) -> str:
        """SHA-256 over output ids and log-probabilities."""
        return self.samples[0].digest

    @property
    def stats(self) -> SequenceStats:
        """Passes, drafts and times."""
        return self.samples[0].stats


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """Log-probabilities of given tokens: one entry per token after the first."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-probability."""
        return math.exp(-sum(entry.logprob for entry in self.logprobs) / len(self.logprobs))


@contextmanager
def _collecting_only_new_objects() -> Iterator[None]:
    """Meanwhile the garbage collector leaves alone what was there before: looking at it took a tenth of a batch."""
    if gc.get_freeze_count():  # somebody else's choice
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class LLM(Runtime):
    """A loaded model, ready to generate. What it is made of, and its arguments, are Runtime's."""

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: Params | Sequence[Params] | None = None,
        *,
        drafter: str | None = None,
        speculative: Speculative = None,
        on_finish: Callable[[int, Completion], None] | None = None,
        receipts: bool = False,
    ) -> list[Completion]:
        """Complete one prompt or many as one batch; results in input order.

        Prompts are text, token ids, or dicts in the form of a line of `generate --prompts`: `{"prompt": ...}`, with
        `token_ids` or `messages` instead, parameters of its own, and a `prediction` of the answer to draft from: text
        or ids, a list of alternatives, or a `Draft`. One set of parameters serves all prompts, or there is one per
        prompt; a dict of its fields will do.
        `drafter` names another drafter; `speculative` says all of it: `{"method", "tree", "accept"}`, or False.
        `on_finish(index, completion)` is called as each ends. Interrupted, it frees everything it started. With
        `receipts`, which only deterministic requests can have, each completion holds one per sample.
        """
        requests = self.requests(prompts, params, drafter=drafter, speculative=speculative)
        return self.run(requests, on_finish=on_finish, receipts=receipts)

    def requests(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: Params | Sequence[Params] | None = None,
        *,
        drafter: str | None = None,
        speculative: Speculative = None,
    ) -> list[Request]:
        """`request` for one prompt or many."""
        speculation = self.chosen(drafter, speculative)
        each = pair(prompts, params)
        texts = [i for i, prompt in enumerate(each) if isinstance(prompt.content, str)]
        if len(texts) > 1:
            for i, ids in zip(texts, self.tokenizer.encode_all([each[i].content for i in texts]), strict=True):  # type: ignore[misc]
                each[i] = replace(each[i], content=ids)
        return [self._request(prompt, speculation) for prompt in each]

    def run(
        self,
        requests: Sequence[Request],
        *,
        on_finish: Callable[[int, Completion], None] | None = None,
        receipts: bool = False,
    ) -> list[Completion]:
        """`generate` for requests made by `request`: a batch whose prompts may name different drafters."""
        check_requests(requests, receipts=receipts)
        samples: dict[int, list[SampleOutput]] = defaultdict(list)
        done: dict[int, Completion] = {}
        with Inbox(self.thread) as inbox, _collecting_only_new_objects():
            batch = new_batch()
            ids = inbox.submit([replace(r, is_streamed=False, batch=batch) for r in requests])
            while len(done) < len(requests):
                for event in inbox.take():
                    index = event.request_id - ids.start
                    if event.output is not None:
                        samples[index].append(event.output)
                    if len(samples[index]) == requests[index].params.n:
                        done[index] = self.completion(requests[index], samples.pop(index), receipts=receipts)
                        if on_finish is not None:
                            on_finish(index, done[index])
        return [done[i] for i in range(len(requests))]

    def stream(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        drafter: str | None = None,
        speculative: Speculative = None,
        trace: bool = False,
    ) -> Iterator[TokenEvent]:
        """Complete one prompt, giving each commit as it happens; the last event carries the whole output.

        Closing the iterator aborts the request. With `trace`, events tell of the drafts that were judged.
        """
        request = self.request(prompt, params, drafter=drafter, speculative=speculative)
        return self.events(replace(request, is_traced=trace))

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        params: Params | None = None,
        *,
        drafter: str | None = None,
        speculative: Speculative = None,
    ) -> Completion: ...

    @overload
    def chat(
        self,
        messages: Sequence[Sequence[Message]],
        params: Params | Sequence[Params] | None = None,
        *,
        drafter: str | None = None,
        speculative: Speculative = None,
    ) -> list[Completion]: ...

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params | Sequence[Params] | None = None,
        *,
        drafter: str | None = None,
        speculative: Speculative = None,
    ) -> Completion | list[Completion]:
        """Answer a conversation through the model's chat template, or a list of them, as one batch."""
        many = _are_conversations(messages)
        conversations: Any = messages if many else [messages]
        prompts = [self.chat_ids(conversation) for conversation in conversations]
        completions = self.generate(prompts, params, drafter=drafter, speculative=speculative)
        return completions if many else completions[0]

    def chat_stream(
        self,
        messages: Sequence[Message],
        params: Params | None = None,
        *,
        drafter: str | None = None,
        speculative: Speculative = None,
    ) -> Iterator[TokenEvent]:
        """`chat`, streamed."""
        return self.stream(self.chat_ids(messages), params, drafter=drafter, speculative=speculative)

    def request(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        drafter: str | None = None,
        speculative: Speculative = None,
    ) -> Request:
        """The engine's request for a prompt. Raises InputError if this model can never serve it."""
        return self._request(spec(prompt, params), self.chosen(drafter, speculative))

    def _request(self, prompt: PromptSpec, speculation: Speculation) -> Request:
        self.thread.check_open()
        params, ids = prompt.params, prompt.content
        if ids is None:
            ids = self.chat_ids(prompt.messages)
        prompt_ids = self.tokenizer.encode(ids) if isinstance(ids, str) else ids
        request = Request(
            prompt_ids=prompt_ids,
            params=params,
            speculation=speculation,
            eos_ids=self.tokenizer.eos_ids,
            text=partial(answer_text, self.tokenizer, prompt_ids, params),
            grammar=self.grammar(params),
            prediction_ids=self._predicted(prompt.prediction),
        )
        self.thread.engine.validate(request)
        return request

    def _predicted(self, prediction: Prediction) -> Predicted:
        """The same in tokens."""
        if isinstance(prediction, Draft):
            return prediction
        rows = [self.tokenizer.encode(e, add_special=False) if isinstance(e, str) else e for e in prediction]
        return rows[0] if len(rows) == 1 else rows

    def chosen(self, drafter: str | None, speculative: Speculative) -> Speculation:
        """What a request asks for, or the default; naming the default's drafter keeps its tree and rule."""
        if drafter is not None and speculative is not None:
            raise InputError("drafter and speculative exclude each other")
        named = drafter is not None and drafter != self._speculation.method
        chosen = Speculation.parse({"method": drafter} if named else speculative, self._speculation)
        names_one = drafter is not None or (isinstance(speculative, Mapping) and "method" in speculative)
        if chosen.method == AUTO and not names_one:
            has_draft_model = self.calibration.draft_cost is not None
            method = default_method(looks_up=True, has_draft_model=has_draft_model, accept=chosen.accept)
            chosen = replace(chosen, method=method)
        if chosen.method == MODEL_DRAFTER and self.calibration.draft_cost is None:
            raise InputError("drafter model needs a draft_model")
        return chosen

    def receipt(self, prompt: Prompt, params: Params, output: SampleOutput) -> Receipt:
        """The receipt of an answer that was streamed; `output` came with its last event."""
        return self.receipt_of(self.request(prompt, params, speculative=False), output)

    def score(self, prompt: Prompt, *, alternatives: int = 0) -> ScoreResult:
        """Log-probabilities of the given tokens under the model, in parallel canonical passes."""
        check_int("alternatives", alternatives, 0, MAX_ALTERNATIVES)
        params = SamplingParams(max_tokens=0, prompt_logprobs=alternatives)
        (completion,) = self.generate([prompt], params, drafter="none")
        if completion.prompt_logprobs is None or completion.error is not None:
            raise NumericError(completion.error or "the model gave no log-probabilities")
        return ScoreResult(completion.prompt_ids, completion.prompt_logprobs)

    def events(self, request: Request) -> Generator[TokenEvent, None, None]:
        """`stream` for a request made by `request`."""
        num_left = request.params.n
        with Inbox(self.thread) as inbox:
            inbox.submit([request])
            while num_left:
                for event in inbox.take():
                    num_left -= event.output is not None
                    yield event

    def completion(self, request: Request, samples: Iterable[SampleOutput], *, receipts: bool = False) -> Completion:
        """The samples of one request, put together."""
        ordered = tuple(sorted(samples, key=lambda s: s.sample_index))
        recorded = [s for s in ordered if receipts and s.finish_reason is not FinishReason.ERROR]
        return Completion(
            tuple(request.prompt_ids), ordered, self.profile, tuple(self.receipt_of(request, s) for s in recorded)
        )

    def receipt_of(self, request: Request, output: SampleOutput) -> Receipt:
        """The receipt of a sample that `request` was answered with."""
        return make_receipt(
            model=self.identity,
            profile=self.calibration.profile,
            prompt_ids=request.prompt_ids,
            params=request.params,
            max_len=self.max_len,
            eos_ids=request.eos_ids,
            output=output,
            library=library_version(),
        )


def check_requests(requests: Sequence[Request], *, receipts: bool) -> None:
    """Raise InputError for what is no request, or cannot have a receipt where one is wanted."""
    for request in requests:
        if not isinstance(request, Request):
            raise InputError(f"requests must be made by `request`, not {type(request).__name__}")
        if receipts:
            check_recordable(request.params)


def _are_conversations(messages: object) -> bool:
    """Whether these are lists of messages, not messages. What is neither is taken for one, and refused as such."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        return False
    return all(isinstance(each, Sequence) and not isinstance(each, str) for each in messages)
