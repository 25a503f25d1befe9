"""A replica: one loaded model that answers requests of any ingress, and what an ingress must know of it.

Knows the engine and the channel; nothing of Ray, which only starts it and hands it work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

from verispec.async_llm import Stream
from verispec.backends.calibration import Calibration
from verispec.engine import Request
from verispec.engine.request import RequestChecks
from verispec.errors import DeterminismError, InputError, QueueFullError
from verispec.llm import LLM
from verispec.model.architecture import Architecture
from verispec.model.file_digest import ModelIdentity
from verispec.model.tokenizer import Tokenizer
from verispec.ray.channel import Address, Load, Uplink
from verispec.server.core import Core
from verispec.server.ops import trouble
from verispec.server.settings import Settings
from verispec.spec.speculation import Speculation
from verispec.text.detokenizer import answer_text


@dataclass(frozen=True, slots=True)
class Card:
    """What an ingress knows of the model that it serves without having it."""

    fingerprint: str
    options: Mapping[str, Any]
    tokenizer: Tokenizer
    architecture: Architecture
    generation_defaults: Mapping[str, Any]
    identity: ModelIdentity
    calibration: Calibration
    speculation: Speculation
    checks: RequestChecks
    usable_drafters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Work:
    """A request on its way to a replica. `avoid` are replicas that others are preferred to, `refused` are never asked;
    `prefix_keys` name the beginnings of its prompt.
    """

    request: Request  # without text and grammar: a replica makes its own
    keeps_stop: bool
    shown_ids: tuple[int, ...]
    attempt: int
    address: Address
    fingerprint: str
    avoid: frozenset[str] = frozenset()
    refused: frozenset[str] = frozenset()
    prefix_keys: tuple[int, ...] = ()


class Fate(StrEnum):
    """What became of work."""

    DONE = "done"
    BUSY = "busy"
    OTHER_PROFILE = "other profile"
    BAD = "bad"


class Outcome(NamedTuple):
    """What a replica says of work, apart from the tokens."""

    replica: str
    fate: Fate
    detail: str = ""


class Replica:
    """One model, loaded with `options`, that answers to `name`. Use it on one loop."""

    def __init__(self, name: str, llm: LLM, options: Mapping[str, Any] | None = None) -> None:
        self.name = name
        self.llm = llm
        self._options = dict(options or {})
        self._core = Core(llm, Settings())
        self._links: dict[Address, asyncio.Future[Uplink]] = {}
        self._streams: dict[tuple[Address, int], Stream] = {}

    @property
    def fingerprint(self) -> str:
        """Equal for replicas whose answers are equal."""
        return self._core.fingerprint

    def check_fingerprint(self, wanted: str | None) -> None:
        """Raise unless it is the one that is wanted, if one is."""
        if wanted not in (None, self.fingerprint):
            raise DeterminismError(
                f"this replica has the fingerprint {self.fingerprint}, the application wants {wanted}: another device, "
                "library or model file gives other bytes"
            )

    def card(self) -> Card:
        """What an ingress must know."""
        llm = self.llm
        return Card(
            fingerprint=self.fingerprint,
            options=self._options,
            tokenizer=llm.tokenizer,
            architecture=llm.architecture,
            generation_defaults=dict(llm.generation_defaults),
            identity=llm.identity,  # its digests are known by now: the fingerprint has them
            calibration=llm.calibration,
            speculation=llm._speculation,
            checks=llm.thread.engine.checks,
            usable_drafters=llm.drafter_names,
        )

    async def run(self, work: Work) -> Outcome:
        """Answer a request to the ingress's hub. Returns when everything was said."""
        if work.fingerprint != self.fingerprint:
            return Outcome(self.name, Fate.OTHER_PROFILE, self.fingerprint)
        try:
            link = await self._link(work.address)
            stream = self._core.open([await self._request(work)])
        except OSError as error:
            return Outcome(self.name, Fate.BAD, f"the ingress cannot be reached: {error}")
        except QueueFullError as error:
            return Outcome(self.name, Fate.BUSY, str(error))
        except InputError as error:
            return Outcome(self.name, Fate.BAD, str(error))
        key = (work.address, work.attempt)
        self._streams[key] = stream
        link.say(work.attempt, [])
        try:
            while events := await stream.take():
                link.say(work.attempt, events)
                await link.room()
        finally:
            stream.close()
            del self._streams[key]
        return Outcome(self.name, Fate.DONE)

    def trouble(self) -> str | None:
        """What is wrong with the engine, if anything is."""
        return trouble(self._core)

    def load(self) -> Load:
        """What it has to do."""
        status = self.llm.status()
        return Load(status.num_running, status.num_waiting, status.kv_usage)

    def close(self) -> None:
        """Give back the model's memory."""
        self.llm.close()

    async def _request(self, work: Work) -> Request:
        """The work with a text and a grammar of its own; compiled on another thread, so that streams go on."""
        params, prompt_ids = work.request.params, work.request.prompt_ids
        grammar = None if params.constraint is None else await asyncio.to_thread(self.llm.grammar, params)
        options = {"keeps_stop": work.keeps_stop, "shown_ids": work.shown_ids}
        text = partial(answer_text, self.llm.tokenizer, prompt_ids, params, **options)
        return replace(work.request, text=text, grammar=grammar)

    async def _link(self, address: Address) -> Uplink:
        """The connection to an ingress, made with its first request."""
        found = self._links.get(address)
        if found is None:

            def on_abort(attempt: int) -> None:
                if (stream := self._streams.get((address, attempt))) is not None:
                    stream.close()

            def on_lost() -> None:
                self._links.pop(address, None)
                for _, stream in [(a, s) for (a, _), s in self._streams.items() if a == address]:
                    stream.close()

            connecting = Uplink.connect(address, replica=self.name, load=self.load, on_abort=on_abort, on_lost=on_lost)
            found = self._links[address] = asyncio.ensure_future(connecting)
            found.add_done_callback(lambda f: self._links.pop(address, None) if f.exception() else None)
        return await asyncio.shield(found)
