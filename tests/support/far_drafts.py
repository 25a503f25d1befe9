"""A device that is far from the host and drafts by itself, on a clock of its own: how long everything takes is known.

Passes run one after the other, and what each takes depends on whose they are and on their context. Draft passes that
nobody wants are left out, and rounds in which nobody is there idle: both cost little. The host takes no time but trips.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from tests.support.fake_backend import FakeBackend
from verispec.backends.protocol import Pass, PassResult, Ticket
from verispec.kv import DUMP_SLOT, TARGET_STORE


class Seconds(NamedTuple):
    """About those of a model of 1.5B on an H200, drafted for by one of 0.5B."""

    target: float = 1.0e-3
    draft: float = 0.4e-3
    row: float = 0.01e-3  # a further one
    context_token: float = 0.1e-6
    left_out: float = 0.03e-3
    idle: float = 0.2e-3
    trip: float = 0.3e-3


@dataclass(eq=False)
class Sent:
    """A pass, by its store."""

    store: int


class FarDrafts(FakeBackend):
    """`likeness` is how much of the target's text the second model knows."""

    def __init__(self, seconds: Seconds, *, likeness: float, vocab_size: int, context_len: int) -> None:
        super().__init__(
            vocab_size=vocab_size, context_len=context_len, num_slots=8 * context_len, num_stores=2, max_tail=64
        )
        self.limits = replace(self.limits, prepares=True, trees=True)
        self.markov[1] = likeness * self.markov[0] + (1 - likeness) * self.markov[1]
        self.seconds, self.now = seconds, 0.0
        self._free = self._spent = 0.0  # when the device has nothing left; what the pass that is run takes
        self._num_targets = self._num_drafted = self._depth = 0  # of it: rounds, draft passes of a round, at most
        self._newest = Sent(TARGET_STORE)
        self.num_draft_passes = 0  # of the second model, by themselves
        self.num_waits = 0  # for one of those while nothing else was in the air

    def submit(self, pass_: Pass) -> Ticket:  # type: ignore[override]
        self._spent, self._num_targets, self._num_drafted, self._depth = 0.0, 0, 0, 0
        if pass_.burst is not None and pass_.burst.drafts:
            tree = pass_.burst.drafts[0].tree
            self._depth = int(pass_.burst.draft_lens.max()) if tree is None else len(tree.keep)
        ready = super().submit(pass_).result()
        asked = 1 if pass_.burst is None else 1 + pass_.burst.num_rounds
        if pass_.store == TARGET_STORE:
            self._spent += (asked - self._num_targets) * self.seconds.idle
        self.now += self.seconds.trip / 2
        self._free = max(self.now, self._free) + self._spent
        self._newest = Sent(pass_.store)
        self.num_draft_passes += pass_.store != TARGET_STORE
        return FarTicket(self, self._free, ready, self._newest)

    def run(self, pass_: Pass) -> PassResult:
        rows, seconds = pass_.rows, self.seconds
        going = rows.slots != DUMP_SLOT
        if going.any():
            more = (len(rows) - 1) * seconds.row + int(rows.positions[going].max()) * seconds.context_token
            if pass_.store == TARGET_STORE:
                self._spent += seconds.target + more + (self._depth - self._num_drafted) * seconds.left_out
                self._num_targets, self._num_drafted = self._num_targets + 1, 0
            else:
                self._spent += seconds.draft + more / 2
                self._num_drafted += 1
        with np.errstate(over="ignore"):
            return super().run(pass_)

    def wait_until(self, end: float, sent: Sent) -> None:
        self.num_waits += sent is self._newest and sent.store != TARGET_STORE
        self.now = max(self.now, end) + self.seconds.trip / 2


@dataclass
class FarTicket:
    backend: FarDrafts
    end: float
    ready: PassResult
    sent: Sent

    def result(self) -> PassResult:
        self.backend.wait_until(self.end, self.sent)
        return self.ready
