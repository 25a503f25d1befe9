"""/verispec/receipts, /verispec/keys, /verispec/replay and /verispec/check: whether answers are what they should be.

They are requests like any other: they wait in the same queue, count against the same limits, and disturb nobody.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Self, TypeVar

from verispec.async_llm import Stream
from verispec.engine import Request
from verispec.errors import InputError, QueueFullError
from verispec.receipt import Receipt, parse
from verispec.receipt.report import as_object
from verispec.receipt.rerun import Redrawing, drawn_request, known_prompt
from verispec.server.api import ReplayRequest
from verispec.server.core import Core
from verispec.server.errors import ApiError, stopping
from verispec.server.http import Received, Reply, json_reply
from verispec.spec.speculation import OFF, Speculation
from verispec.types import FinishReason, SampleOutput, TokenEvent, TokenLogprobs

T = TypeVar("T")
CROWD = 6  # requests of others beside the one that is checked, where the server takes so many
_MAX_AUDITS = 4  # that run at one time


async def receipt(core: Core, received: Received) -> Reply:
    """A receipt that was asked for with an answer."""
    found = core.receipts.find(received.request.path_params["name"], received.tenant)
    return Reply(found.to_json().encode(), headers={"Content-Disposition": 'attachment; filename="receipt.json"'})


async def keys(core: Core, received: Received) -> Reply:
    """The public keys whose signatures this server's receipts have."""
    key = core.settings.signing_key
    found = [] if key is None else [{"algorithm": "Ed25519", "public_key": key.public.hex, "pem": key.public.pem}]
    return json_reply({"keys": found})


class _Audit:
    """Batches that are nobody's answer, one after another. It counts until all that was begun for it has ended."""

    def __init__(self, core: Core, num_samples: int) -> None:
        if core.num_of(_Audit) >= _MAX_AUDITS:
            raise QueueFullError(f"{_MAX_AUDITS} receipts are being checked already; try again later")
        core.check_room(num_samples)
        core.enter(self, num_samples)
        self._core = core
        self._timer = core.after_timeout(self._fail)
        self._stream: Stream | None = None
        self._error: ApiError | None = None
        self._made: asyncio.Future[Any] | None = None

    def abort(self) -> None:
        """End it at once; whoever waits for it is told."""
        self._fail(stopping())

    def _fail(self, error: ApiError) -> None:
        self._error = error
        if self._stream is not None:
            self._stream.fail(error)

    async def on_thread(self, make: Callable[[], T]) -> T:
        """`make()`, on another thread, which nothing can end."""
        self._made = made = asyncio.ensure_future(asyncio.to_thread(make))
        return await asyncio.shield(made)

    async def events(self, batch: Sequence[Request]) -> AsyncGenerator[TokenEvent, None]:
        """Those of a batch's first request. Raises ApiError where they end otherwise."""
        if self._error is not None:
            raise self._error
        self._stream = stream = self._core.open(batch)
        async with stream:
            while events := await stream.take():
                for event in events:
                    if event.output is not None and event.output.finish_reason is FinishReason.ABORT:
                        raise stopping()
                    if event.request_id == stream.request_ids[0]:
                        yield event

    async def answered(self, batch: Sequence[Request]) -> SampleOutput:
        """What the first request of a batch is answered."""
        async with aclosing(self.events(batch)) as events:
            async for event in events:
                if event.output is not None and event.output.error is not None:
                    raise ApiError(500, f"the engine failed: {event.output.error}", code="engine_error")
                if event.output is not None:
                    return event.output
        raise AssertionError("the last event has the output")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._timer.cancel()
        if self._made is None or self._made.done():
            self._core.leave(self)
        else:
            self._made.add_done_callback(self._leave)

    def _leave(self, made: asyncio.Future[Any]) -> None:
        if not made.cancelled():
            made.exception()  # nobody else will look at it
        self._core.leave(self)


async def replay_receipt(core: Core, received: Received) -> Reply:
    """Draw a receipt's answer again and compare every token and log-probability."""
    recorded, prompt_ids = _asked(core, received)
    with _Audit(core, 1) as audit:
        redrawing = await audit.on_thread(lambda: Redrawing(core.llm, recorded, prompt_ids, salt=received.tenant))
        if redrawing.request is not None:
            async with aclosing(audit.events([redrawing.request])) as events:
                async for event in events:
                    if redrawing.take(event):
                        break
        result = redrawing.result
    core.metrics.replays.inc()
    core.metrics.replay_failures.inc(not result.agrees)
    return json_reply({**as_object(result, recorded), "is_signed_here": _is_signed_here(core, recorded)})


async def check(core: Core, received: Received) -> Reply:
    """Draw a receipt's answer under other circumstances: the digests must all be the same."""
    recorded, prompt_ids = _asked(core, received)
    ids = known_prompt(recorded, prompt_ids)
    found: dict[str, SampleOutput] = {}
    num_others = min(CROWD, core.settings.max_samples - 1)
    with _Audit(core, num_others + 1) as audit:
        request = await audit.on_thread(lambda: drawn_request(core.llm, recorded, ids, salt=received.tenant))
        for name, batch in _circumstances(core, request, num_others):
            found[name] = await audit.answered(batch)
        found["K/V lost half-way"] = await _interrupted(audit, request, len(recorded.output.drawn_ids) // 2)
    runs = [{"circumstance": n, "digest": o.digest, "num_tokens": len(o.logprobs)} for n, o in found.items()]
    told = {(output.digest, output.token_ids) for output in found.values()}
    equal = len(told) == 1 and told.pop()[1] == recorded.output.drawn_ids
    return json_reply({"equal": equal, "runs": runs})


def _is_signed_here(core: Core, recorded: Receipt) -> bool:
    if (key := core.settings.signing_key) is None:
        return False
    try:
        key.public.check(recorded)
    except InputError:
        return False
    return True


def _circumstances(core: Core, request: Request, num_others: int) -> list[tuple[str, list[Request]]]:
    """Batches whose first request is the one that is checked."""
    seed = request.params.seed or 0
    prompts = request.prompt_ids, request.prompt_ids[1:] or request.prompt_ids
    others = [
        replace(request, params=replace(request.params, seed=(seed + 1 + i) % 2**53), prompt_ids=prompts[i % 2])
        for i in range(num_others)
    ]
    alone = replace(request, speculation=Speculation(OFF))
    drafters = [name for name in core.llm.drafter_names if name != OFF]
    drafted = [(f"drafter {name}", [replace(request, speculation=Speculation(name))]) for name in drafters]
    cold = replace(alone, salt=_fresh_salt())
    crowd = [("in a crowd", [request, *others])] if others else []
    return [("drafter none", [alone]), ("without cached prefix", [cold]), *drafted, *crowd]


def _fresh_salt() -> str:
    """A prefix cache that nobody has used before."""
    return secrets.token_hex(16)


async def _interrupted(audit: _Audit, request: Request, num_tokens: int) -> SampleOutput:
    """Only the tokens outlive the first half, as with preemption or a restart: the other half computes K/V anew."""
    given_ids = request.committed_ids[0] if request.committed_ids else ()
    limit = max(1, len(given_ids) + num_tokens)
    params = replace(request.params, max_tokens=limit, min_tokens=min(limit, request.params.min_tokens))
    first = await audit.answered([replace(request, params=params, salt=_fresh_salt())])
    committed_ids = [[*given_ids, *first.token_ids]]
    rest = await audit.answered([replace(request, committed_ids=committed_ids, salt=_fresh_salt())])
    return replace(rest, logprobs=TokenLogprobs.of([*first.logprobs, *rest.logprobs]))


def _asked(core: Core, received: Received) -> tuple[Receipt, list[int] | None]:
    body = received.parsed(ReplayRequest)
    if (body.id is None) == (body.receipt is None):
        raise InputError("receipt: give either a receipt or the id of one")
    if body.id is not None:
        return core.receipts.find(body.id, received.tenant), body.prompt_ids
    return parse(json.dumps(body.receipt)), body.prompt_ids
