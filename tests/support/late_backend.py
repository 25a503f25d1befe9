"""A backend that computes as late as it may: what is in the air is really in the air, over slots that are poisoned."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tests.support.faulty_backends import WrappedBackend
from verispec.backends.protocol import Backend, Pass, PassResult, Ticket


class LateBackend(WrappedBackend):
    """Runs a pass when its result is asked for, after those submitted before it. `bind` takes effect at once.

    `rounds` are those of every pass; `failing` are numbers of passes, from 1, that fail once they have run.
    """

    def __init__(self, inner: Backend, *, failing: Callable[[int], bool] = lambda number: False) -> None:
        super().__init__(inner)
        self._failing = failing
        self._queue: deque[LateTicket] = deque()
        self.rounds: list[int] = []
        self.most_in_air = 0

    @property
    def num_in_air(self) -> int:
        return len(self._queue)

    def submit(self, pass_: Pass) -> Ticket:
        self.rounds.append(1 if pass_.burst is None else 1 + pass_.burst.num_rounds)
        ticket = LateTicket(self, pass_, len(self.rounds))
        self._queue.append(ticket)
        self.most_in_air = max(self.most_in_air, len(self._queue))
        return ticket

    def run_until(self, ticket: LateTicket) -> None:
        while ticket.ready is None:
            first = self._queue.popleft()
            first.ready = self.inner.submit(first.pass_).result()
            if self._failing(first.number):
                raise RuntimeError("the device went away")


@dataclass(eq=False)
class LateTicket:
    backend: LateBackend
    pass_: Pass
    number: int
    ready: PassResult | None = None

    def result(self) -> PassResult:
        self.backend.run_until(self)
        assert self.ready is not None
        return self.ready
