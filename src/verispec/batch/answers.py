"""From a line to its result: the server's own routes for lines of OpenAI's form, the library for prompt lines.

A result is a function of the line, its number, the options and the model: ids are derived from the line, seeds that a
line does not name from its `custom_id` (a prompt line's is its number), and times and counts that depend on what else
ran are left out unless they are asked for.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

from verispec import __version__
from verispec.async_llm import Stream
from verispec.batch.lines import MAX_SEED_DIGITS, derived, is_prompt_line
from verispec.batch.prompts import LineReader, as_object
from verispec.batch.resume import PROGRESS, Progress, ResumingLLM
from verispec.constraints import library_version
from verispec.engine import Request
from verispec.errors import InputError, QueueFullError
from verispec.llm import LLM
from verispec.strict_json import load_object
from verispec.types import FinishReason, SampleOutput, SamplingParams

if TYPE_CHECKING:
    from verispec.server.core import Core

T = TypeVar("T")
_TRIES = 3  # of a line whose pass failed
_WAIT_SECONDS = 0.05  # for room in the queue
_MAX_SAMPLES = 4096  # of one line; and of all that are under way
_ID_DIGITS = 24
_RECEIPTS: ContextVar[dict[str, str]] = ContextVar("RECEIPTS")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What results depend on beside the line and the model. `params`, `raw` and `system` are of prompt lines."""

    params: SamplingParams = field(default_factory=lambda: SamplingParams(seed=None))
    raw: bool = False
    system: str | None = None
    served_names: tuple[str, ...] = ()
    receipts: bool = False
    stats: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Options:
        found = json.loads(text)
        params = found.pop("params")
        params["logit_bias"] = dict(params["logit_bias"])
        return cls(params=SamplingParams(**params), **{**found, "served_names": tuple(found["served_names"])})


@dataclass(frozen=True, slots=True)
class Result:
    """What comes of a line: the line of the output, its receipts, and what was wrong with it."""

    result: str
    receipts: tuple[str, ...] = ()
    error: str | None = None


class Answerer:
    """Answers lines, any number at once, as one batch."""

    def __init__(self, llm: LLM, options: Options, *, drafter: str | None = None) -> None:
        self.llm = llm
        self._options = options
        self._drafter = drafter or llm.chosen(None, None).method
        self._llm = ResumingLLM(llm)
        self._core: Core | None = None

    @property
    def parts(self) -> dict[str, str]:
        """What results depend on beside the line and the options, as the journal notes it."""
        llm = self.llm
        files = [file.sha256 for file in llm.identity.files]
        defaults = json.dumps(dict(llm.generation_defaults), sort_keys=True)
        return {
            "model": derived(*files, llm.tokenizer.chat_template or "", defaults),
            "profile": llm.profile,
            "max_len": str(llm.max_len),
            "constraints": _constraint_library(),
        }

    async def answer(self, index: int, line: bytes, progress: Progress, *, earlier: int | None = None) -> Result:
        """The result of line number `index`. Raises what no line is to blame for.

        `earlier` is a line with the same custom_id, which makes this one an error.
        """
        PROGRESS.set(progress)
        _RECEIPTS.set({})
        try:
            data = load_object(line, name="the line", example='{"custom_id": "...", "url": "...", "body": {...}}')
        except InputError as error:
            return _refused(None, "invalid_line", str(error))
        if is_prompt_line(data):
            return await self._prompt_line(index, line)
        return await self._batch_line(line, data, earlier)

    async def _prompt_line(self, index: int, line: bytes) -> Result:
        asked = self._options
        reader = LineReader(self.llm, asked.params, self._drafter, asked.raw, asked.system, recorded=asked.receipts)
        parsed = reader.parse(index, line)
        if parsed.request is None:
            return Result(_written({"index": index, **parsed.extra, "error": parsed.error}), error=parsed.error)
        for _ in range(_TRIES):
            outputs: list[SampleOutput] = []
            async with await _when_room(partial(self._open, parsed.request)) as stream:
                async for event in stream:
                    outputs += [event.output] if event.output is not None else []
            if all(output.finish_reason is not FinishReason.ERROR for output in outputs):
                break
        self.llm.thread.check_open()  # a backend that is dead is no line's fault
        completion = self.llm.completion(parsed.request, outputs, receipts=asked.receipts)
        found = as_object(completion, drafter=self._drafter, stats=asked.stats)
        receipts = tuple(receipt.to_json() for receipt in completion.receipts)
        return Result(_written({"index": index, **parsed.extra, **found}), receipts, completion.error)

    async def _open(self, request: Request) -> Stream:
        return self._llm.open([request])

    async def _batch_line(self, line: bytes, data: dict[str, Any], earlier: int | None) -> Result:
        custom_id, url, body = data.get("custom_id"), data.get("url"), data.get("body")
        core, routes = self._server()
        if not isinstance(custom_id, str) or not custom_id:
            return _refused(None, "missing_custom_id", "custom_id must be text that is not empty")
        if earlier is not None:
            return _refused(custom_id, "duplicate_custom_id", f"custom_id is that of line {earlier + 1}, too")
        if unknown := sorted(data.keys() - {"custom_id", "method", "url", "body"}):
            return _refused(custom_id, "unknown_key", f"the line has the unknown key {unknown[0][:100]!r}")
        if data.get("method", "POST") != "POST":
            return _refused(custom_id, "invalid_method", "method must be POST")
        if not isinstance(url, str) or url not in routes:
            return _refused(custom_id, "invalid_url", f"url must be one of {', '.join(routes)}, not {str(url)[:100]!r}")
        if not isinstance(body, dict):
            return _refused(custom_id, "invalid_body", "body must be an object")
        status, found, message = await self._answered(core, routes[url], custom_id, body)
        result = {
            "id": f"batch_req_{derived(custom_id)[:_ID_DIGITS]}",
            "custom_id": custom_id,
            "response": {"status_code": status, "request_id": f"req_{derived(custom_id)[:_ID_DIGITS]}", "body": found},
            "error": None,
        }
        return Result(_written(result), tuple(_RECEIPTS.get().values()), message)

    def _server(self) -> tuple[Core, dict[str, Any]]:
        """The server's core, and the routes that lines may name: those whose answers a seed decides."""
        try:
            from verispec.server.app import ROUTES
            from verispec.server.core import Core
            from verispec.server.settings import Settings
        except ModuleNotFoundError as error:
            raise InputError(
                f"lines of OpenAI's form need the package {error.name}: pip install 'verispec[server]'"
            ) from error
        if self._core is None:
            settings = Settings(
                max_running=1, max_waiting=_MAX_SAMPLES - 1, timeout=1e6, max_pending=2**30,
                served_names=self._options.served_names,
            )  # fmt: skip
            self._core = Core(self.llm, settings, engine=self._llm)
            self._core.receipts.keep = _keep  # type: ignore[method-assign]
        return self._core, {r.path: r for r in ROUTES if r.body is not None and "seed" in r.body.__struct_fields__}

    async def _answered(
        self, core: Core, route: Any, custom_id: str, body: dict[str, Any]
    ) -> tuple[int, dict[str, Any], str | None]:
        """Status, body and, where it is an error, what is wrong."""
        from verispec.server.errors import ApiError, as_api_error
        from verispec.server.http import Received
        from verispec.server.openai import ID_SOURCE

        received = Received.of(json.dumps(self._seeded(body, custom_id)).encode())
        fields = frozenset(route.body.__struct_fields__)
        for tries_left in reversed(range(_TRIES)):
            ID_SOURCE.set(_ids(custom_id))
            try:
                if body.get("stream"):
                    raise ApiError(400, "stream must be false in a batch: its answers are whole", param="stream")
                reply = await _when_room(lambda: route.handler(core, received))
                found = json.loads(reply.body)
                return 200, found if self._options.stats else without_load(found), None
            except Exception as error:
                self.llm.thread.check_open()  # a backend that is dead is no line's fault
                said = as_api_error(error, fields=fields)
                is_engine = said.code == "engine_error"
                if said.status >= 500 and not is_engine:
                    raise
                if not (is_engine and tries_left):
                    said.partial = None  # how far it came depends on what else ran
                    return said.status, said.body(anthropic=route.path.startswith("/v1/messages")), said.message
        raise AssertionError("the last try returns")

    def _seeded(self, body: dict[str, Any], custom_id: str) -> dict[str, Any]:
        if body.get("seed") is None:
            body = {**body, "seed": int(derived("seed", custom_id)[:MAX_SEED_DIGITS], 16)}
        own = body.get("verispec")
        if self._options.receipts and (own is None or isinstance(own, dict)):
            body = {**body, "verispec": {**(own or {}), "receipt": True}}
        return body


async def _when_room(start: Callable[[], Awaitable[T]]) -> T:
    """`start()`, once the queue has room for it."""
    while True:
        try:
            return await start()
        except QueueFullError:
            await asyncio.sleep(_WAIT_SECONDS)


def _constraint_library() -> str:
    try:
        return library_version()
    except PackageNotFoundError:
        return "none"


def parts_of(options: Options) -> dict[str, str]:
    """What results depend on and is known before a model is loaded."""
    return {"options": options.to_json(), "version": __version__}


def without_load(body: dict[str, Any]) -> dict[str, Any]:
    """An answer's body without what depends on the time and on what else ran."""
    found = {key: value for key, value in body.items() if key != "metrics"}
    for name in ("created", "created_at"):
        if name in found:
            found[name] = 0
    if isinstance(found.get("usage"), dict):
        found["usage"] = {
            key: value
            for key, value in found["usage"].items()
            if not key.endswith("_details") and not key.startswith("cache_")
        }
    if isinstance(own := found.get("verispec"), dict):
        found["verispec"] = _settled(own)
    return found


def _settled(own: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: value for key, value in own.items() if key not in ("tokens_per_pass", "no_draft_reason", "receipt")}
    if "choices" in found:
        found["choices"] = [_settled(choice) for choice in found["choices"]]
    return found


def _keep(receipt: Any, tenant: str) -> str:
    """In place of the server's store: each line has its own."""
    name = f"rcpt-{receipt.digest[:_ID_DIGITS]}"
    _RECEIPTS.get()[name] = receipt.to_json()
    return name


def _ids(custom_id: str) -> Callable[[], str]:
    """Ids that are new to the line, and the same whenever it is answered."""

    numbers = count()
    return lambda: derived("id", custom_id, str(next(numbers)))[:_ID_DIGITS]


def _refused(custom_id: str | None, code: str, message: str) -> Result:
    """The result of a line that is no request."""
    found = {"id": None, "custom_id": custom_id, "response": None, "error": {"code": code, "message": message}}
    return Result(_written(found), error=message)


def _written(value: Mapping[str, Any]) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isascii() or _is_text(text) else json.dumps(value)


def _is_text(text: str) -> bool:
    """Whether UTF-8 can have it: halves of surrogate pairs may have come in as escapes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
