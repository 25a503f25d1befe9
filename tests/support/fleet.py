"""Replicas in this process that can be killed in mid-stream, and an ingress's end for them: no Ray, real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from verispec.llm import LLM
from verispec.ray.channel import Address, Hub, Uplink
from verispec.ray.remote import Dispatcher, RemoteLLM, ReplicaLostError
from verispec.ray.replica import Outcome, Replica, Work
from verispec.types import TokenEvent


class Mortal(Replica):
    """A replica that dies, as a process does, once it has told so many tokens. With `mute`, it is
    silent for so many seconds after its first words, as a stopped process is, and says the rest later."""

    def __init__(self, name: str, llm: LLM, *, life: int | None = None, mute: float = 0.0) -> None:
        super().__init__(name, llm)
        self.life = life
        self.mute = mute
        self.is_dead = False
        self.num_runs = 0
        self._tasks: set[asyncio.Task[Outcome]] = set()

    async def run(self, work: Work) -> Outcome:
        self.num_runs += 1
        task = asyncio.ensure_future(super().run(work))
        self._tasks.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if self.is_dead:
                raise ReplicaLostError(f"replica {self.name} died") from None
            task.cancel()
            raise
        finally:
            self._tasks.discard(task)

    async def _link(self, address: Address) -> Uplink:
        link = await super()._link(address)
        if not hasattr(link, "is_watched"):
            link.is_watched = True  # type: ignore[attr-defined]
            say = link.say

            def counted(attempt: int, events: list[TokenEvent]) -> None:
                say(attempt, events if self.life is None else list(self._last_words(events)))
                if self.life == 0:
                    asyncio.get_running_loop().call_soon(self.die)

            link.say = counted  # type: ignore[method-assign]
            if self.mute:
                self._silence(link)
        return link

    def _last_words(self, events: list[TokenEvent]) -> Iterator[TokenEvent]:
        """As many tokens as there is life left, be it in the middle of a commit."""
        for event in events:
            assert self.life is not None
            if len(event.logprobs) < self.life:
                self.life -= len(event.logprobs)
                yield event
            elif self.life:
                told, self.life = self.life, 0
                yield event._replace(logprobs=event.logprobs[:told], pieces=event.pieces[:told], output=None)

    def _silence(self, link: Uplink) -> None:
        write, wakes_at = link.write, asyncio.get_running_loop().time() + self.mute

        def late(value: Any) -> None:
            loop = asyncio.get_running_loop()
            write(value) if loop.time() > wakes_at else loop.call_at(wakes_at, write, value)

        link.write = late  # type: ignore[method-assign]

    def die(self) -> None:
        self.is_dead = True
        for found in list(self._links.values()):
            if found.done() and not found.exception():
                found.result().cut()
        for task in self._tasks:
            task.cancel()


class LocalFleet:
    """Hands work to the first replica that is alive, rather to one that is not to be avoided."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.replicas = list(replicas)
        self.works: list[Work] = []

    async def run(self, work: Work) -> Outcome:
        self.works.append(work)
        while True:
            able = [
                r for r in self.replicas if r.name not in work.refused and not (isinstance(r, Mortal) and r.is_dead)
            ]
            if able:
                return await next((r for r in able if r.name not in work.avoid), able[0]).run(work)
            await asyncio.sleep(0.01)


@asynccontextmanager
async def remote(
    *replicas: Replica,
    silence: float = 5.0,
    **options: Any,
) -> AsyncIterator[tuple[RemoteLLM, LocalFleet]]:
    """The replicas as one model."""
    hub, fleet = Hub(silence=silence), LocalFleet(replicas)
    card = replicas[0].card()
    dispatcher = Dispatcher(card, fleet, hub, await hub.listen("127.0.0.1"), **options)
    try:
        yield RemoteLLM(card, dispatcher), fleet
    finally:
        await hub.close()
