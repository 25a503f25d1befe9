"""From calls to the engine and back: every interface is an adapter over this. Knows nothing of HTTP."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from verispec.async_llm import AsyncLLM, Stream
from verispec.constraints import library_version
from verispec.engine import Request
from verispec.errors import InputError, QueueFullError, VerispecError
from verispec.llm import LLM
from verispec.receipt import Receipt
from verispec.receipt.values import check_recordable
from verispec.server.answer import Answer
from verispec.server.call import Call, speculation
from verispec.server.errors import ApiError
from verispec.server.metrics import Metrics
from verispec.server.receipts import ReceiptStore
from verispec.server.settings import Settings
from verispec.text.detokenizer import TextStream, answer_text
from verispec.types import SampleOutput

T = TypeVar("T")
FINGERPRINT_DIGITS = 16
INLINE_CHARS = 20_000  # longer texts are tokenised on another thread, so that streams go on meanwhile


class Work(Protocol):
    """What counts against the server's limits."""

    def abort(self) -> None:
        """End it at once; whoever waits for it is told."""


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

    def leave(self, work: Work) -> bool:
        """It has come to its end; whether that is news."""
        return self._work.pop(work, None) is not None

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

    def text_of(self, call: Call, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> str:
        """The text that these tokens release at the beginning of a call's answer."""
        stream = self._text_stream(call, prompt_ids)
        return "".join(stream.push(token_id).text for token_id in token_ids)

    def _text_stream(self, call: Call, prompt_ids: Sequence[int]) -> TextStream:
        tokenizer, shown = self.llm.tokenizer, (*call.tools.shown_ids, *call.shown_ids)
        return answer_text(tokenizer, prompt_ids, call.params, keeps_stop=call.keeps_stop, shown_ids=shown)

    def _request(self, call: Call, prompt_ids: Sequence[int]) -> Request:
        params, asked = call.params, call.extension
        if asked.receipt:
            check_recordable(params)
        return Request(
            prompt_ids=prompt_ids,
            params=params,
            speculation=self.llm.chosen(None, speculation(asked.speculative)),
            is_traced=asked.trace,
            eos_ids=self.llm.tokenizer.eos_ids,
            text=lambda: self._text_stream(call, prompt_ids),
            committed_ids=asked.committed_ids or (),
            salt=call.salt,
            grammar=call.grammar,
            prediction_ids=call.prediction_ids,
        )


def _fingerprint(llm: LLM) -> str:
    """Equal for servers whose answers are equal, also to the rest of an answer that another one began: a hash of the
    numeric profile, of the model's files and template, of the library that follows constraints, and of how many tokens
    a request may hold, which ends some answers.
    """
    files = [file.sha256 for file in llm.identity.files]
    parts = [llm.profile, *files, llm.tokenizer.chat_template or "", library_version(), str(llm.max_len)]
    return "vs-" + hashlib.sha256("\n".join(parts).encode()).hexdigest()[:FINGERPRINT_DIGITS]
