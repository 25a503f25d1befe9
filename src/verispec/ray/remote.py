"""A model that is elsewhere, behind the interface of one that is here: the server runs on it unchanged.

`Dispatcher` stands in for the engine's thread. It sends each request to a replica, keeps its journal, and sends what is
left of it to another one when the replica is lost: the client hears one unbroken answer. A share of the requests is
drawn twice, on two replicas, and compared. Knows asyncio and the channel; `Fleet` knows how replicas are reached.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Protocol

from prometheus_client.core import CounterMetricFamily, Metric

from verispec.constraints import Compiler
from verispec.engine import Request
from verispec.engine.thread import Sink, Status
from verispec.errors import VerispecError
from verispec.llm import LLM
from verispec.ray.channel import Address, Hub
from verispec.ray.journal import Journal
from verispec.ray.prefixes import prefix_keys
from verispec.ray.replica import Card, Fate, Outcome, Work
from verispec.text.detokenizer import TextStream
from verispec.types import FinishReason, NoText, TokenEvent, Totals

MAX_LOSSES = 8  # replicas that one request may outlive
BUSY_SECONDS = 0.05  # until a request that found no room is sent again
LAST_FRAME_SECONDS = 2.0  # between a replica's word that it is done and the frame that says so
COUNTED = {
    "failovers": "Requests that went on at another replica.",
    "replicas_refused": "Replicas that are not asked, since their fingerprint is another.",
    "cross_checks": "Requests that were drawn on two replicas.",
    "cross_check_mismatches": "Of these, those whose answers differ: a replica computes wrongly.",
}
logger = logging.getLogger(__name__)


class ReplicaLostError(VerispecError):
    """A replica will not finish what it was asked."""


class Fleet(Protocol):
    """How replicas are reached."""

    async def run(self, work: Work) -> Outcome:
        """Give work to some replica; returns when it has said everything. Raises ReplicaLostError when it is gone."""


class Dispatcher:
    """Requests in, events out, as EngineThread has it; all on the loop it was made on, except where it is said.

    `cross_check` is the share of requests that are drawn twice.
    """

    def __init__(
        self,
        card: Card,
        fleet: Fleet,
        hub: Hub,
        address: Address,
        *,
        cross_check: float = 0.0,
        chance: Callable[[], float] = random.random,
        metrics_prefix: str = "verispec",
    ) -> None:
        self.engine = card.checks  # the part of an engine that says what is wrong with a request
        self.counts: Counter[str] = Counter()
        self._card = card
        self._fleet = fleet
        self._hub = hub
        self._address = address
        self._cross_check = cross_check
        self._chance = chance
        self._loop = asyncio.get_running_loop()
        self._request_ids = itertools.count()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._others: set[asyncio.Future[Any]] = set()
        self._refused: set[str] = set()
        self._prefix = metrics_prefix

    def submit(self, request: Request, sink: Sink) -> int:
        """Send a request to a replica; returns its id. Raises InputError for a bad one. From any thread."""
        self.engine.validate(request)
        request_id = next(self._request_ids)
        self._loop.call_soon_threadsafe(self._start, request_id, request, sink)
        return request_id

    def abort(self, request_id: int) -> None:
        """End a request; its last events say so. From any thread."""
        self._loop.call_soon_threadsafe(self._abort, request_id)

    def check_open(self) -> None:
        """Requests are always taken: where there is no replica they wait for one."""

    def status(self) -> Status:
        """What the replicas have to do, going by what they said last. Never waits."""
        loads = self._hub.loads
        return Status(
            num_running=sum(load.num_running for load in loads),
            num_waiting=sum(load.num_waiting for load in loads),
            totals=Totals(),
            step_seconds=0.0,
            last_step_seconds=0.0,
            predicted_seconds=0.0,
            kv_usage=max((load.kv_usage for load in loads), default=0.0),
        )

    def _start(self, request_id: int, request: Request, sink: Sink) -> None:
        task = self._loop.create_task(self._answer(Journal(request_id, request), sink))
        self._tasks[request_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(request_id, None))

    def _abort(self, request_id: int) -> None:
        if (task := self._tasks.get(request_id)) is not None:
            task.cancel()

    async def _answer(self, journal: Journal, sink: Sink) -> None:
        """Ask replica after replica, until it has ended."""
        seen: set[str] = set()
        num_lost = 0
        try:
            while not journal.has_ended:
                try:
                    await self._attempt(journal, sink, seen)
                except ReplicaLostError as error:
                    num_lost += 1
                    if num_lost > MAX_LOSSES or not journal.can_move:
                        raise
                    self.counts["failovers"] += 1
                    logger.warning("request %d goes on at another replica: %s", journal.request_id, error)
        except asyncio.CancelledError:
            sink(journal.end(FinishReason.ABORT))
            return
        except Exception as error:
            logger.error("request %d has failed", journal.request_id, exc_info=error)
            sink(journal.end(FinishReason.ERROR, str(error)))
            return
        if journal.request.params.deterministic and self._chance() < self._cross_check:
            self._keep(self._loop.create_task(self._compare(journal, seen)))

    async def _attempt(self, journal: Journal, sink: Sink, seen: set[str]) -> None:
        """Ask one replica, rather one that is not in `seen`. Without an end after it, nobody had begun: ask again."""
        ended: asyncio.Future[None] = self._loop.create_future()

        def tell(events: list[TokenEvent]) -> None:
            if told := journal.take(events):
                sink(told)
            if (journal.has_ended or journal.failure is not None) and not ended.done():
                ended.set_result(None)

        def lose(reason: str) -> None:
            if not ended.done():
                ended.set_exception(ReplicaLostError(reason))

        request = journal.rest()
        attempt = self._hub.expect(tell, lose)
        call = asyncio.ensure_future(self._fleet.run(self._work(request, attempt.number, seen)))
        try:
            await asyncio.wait((call, ended), return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                outcome = call.result()
                if outcome.fate is not Fate.DONE:
                    await self._not_done(outcome)
                    return
                seen.add(outcome.replica)
                await asyncio.wait((ended,), timeout=LAST_FRAME_SECONDS)
                lose(f"replica {outcome.replica} did not say everything")
            ended.result()
            if journal.failure is not None:
                raise ReplicaLostError(journal.failure)
        finally:
            if attempt.replica is not None:
                seen.add(attempt.replica)
            self._hub.end(attempt)
            if journal.has_ended:
                self._keep(call)  # it returns by itself
            else:
                call.cancel()
            if ended.done() and not ended.cancelled():
                ended.exception()  # seen

    async def _not_done(self, outcome: Outcome) -> None:
        """What to make of work that a replica did not begin. Raises if no other will."""
        if outcome.fate is Fate.BUSY:
            await asyncio.sleep(BUSY_SECONDS)
        elif outcome.fate is Fate.OTHER_PROFILE:
            if outcome.replica not in self._refused:
                self._refused.add(outcome.replica)
                self.counts["replicas_refused"] += 1
                logger.error(
                    "replica %s is not asked any more: its fingerprint is %s, not %s, so its answers would differ",
                    outcome.replica, outcome.detail, self._card.fingerprint,
                )  # fmt: skip
        else:
            raise VerispecError(outcome.detail)

    def _work(self, request: Request, attempt: int, seen: set[str]) -> Work:
        text = request.text()
        return Work(
            request=replace(request, text=NoText, grammar=None, eos_ids=tuple(request.eos_ids)),
            keeps_stop=isinstance(text, TextStream) and text.keeps_stop,
            shown_ids=text.shown_ids if isinstance(text, TextStream) else (),
            attempt=attempt,
            address=self._address,
            fingerprint=self._card.fingerprint,
            avoid=frozenset(seen),
            refused=frozenset(self._refused),
            prefix_keys=prefix_keys(request.prompt_ids, request.salt),
        )

    async def _compare(self, journal: Journal, seen: set[str]) -> None:
        """Draw the answer again on a replica that had no part in it."""
        again = Journal(journal.request_id, replace(journal.request, is_streamed=False, is_traced=False))
        where = set(seen)
        try:
            while not again.has_ended:
                await self._attempt(again, _ignore, where)
        except VerispecError as error:
            logger.info("request %d was not checked: %s", journal.request_id, error)
            return
        if where == seen:  # there is no other
            return
        self.counts["cross_checks"] += 1
        if again.outputs != journal.outputs:
            self.counts["cross_check_mismatches"] += 1
            logger.error(
                "replicas %s and %s answered a request with the seed %s differently (digests %s and %s): one of them "
                "computes wrongly",
                ", ".join(sorted(seen)), ", ".join(sorted(where - seen)), journal.request.params.seed,
                _digests(journal), _digests(again),
            )  # fmt: skip

    def _keep(self, task: asyncio.Future[Any]) -> None:
        """Let it come to its end, whatever that is."""
        self._others.add(task)

        def forget(done: asyncio.Future[Any]) -> None:
            self._others.discard(done)
            if not done.cancelled() and (error := done.exception()) is not None:
                logger.info("%s", error)

        task.add_done_callback(forget)

    def collect(self) -> Iterable[Metric]:
        """The counts, for Prometheus."""
        for name, text in COUNTED.items():
            yield CounterMetricFamily(f"{self._prefix}:{name}", text, value=self.counts[name])


class RemoteLLM(LLM):
    """What the server needs of a model, without one: the card of a replica, and a dispatcher instead of an engine."""

    def __init__(self, card: Card, dispatcher: Dispatcher) -> None:
        self.tokenizer = card.tokenizer
        self.architecture = card.architecture
        self.generation_defaults = card.generation_defaults
        self.identity = card.identity
        self.calibration = card.calibration
        self.thread: Any = dispatcher
        self._usable_drafters = card.usable_drafters
        self._speculation = card.speculation
        self._config = card.checks.config
        self._backend: Any = SimpleNamespace(limits=card.checks.limits)
        self._constraints = Compiler(self.tokenizer, self.vocab_size)
        self._chat_prompts = None
        self._chat_lock = threading.Lock()

    @property
    def drafter_names(self) -> tuple[str, ...]:
        """Those that can draft at the replicas."""
        return self._usable_drafters


def _ignore(events: list[TokenEvent]) -> None:
    pass


def _digests(journal: Journal) -> str:
    return ", ".join(output.digest[:16] for output in journal.outputs)
