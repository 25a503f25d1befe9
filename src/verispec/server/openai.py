"""What chat completions and completions have in common: calls from fields, whole answers, and frames.

An interface says how one choice is written, whole and as a frame; everything around it is here.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import msgspec

from verispec.server.answer import Answer
from verispec.server.api import Completing, Extension, Sampling, StreamOptions
from verispec.server.call import Call
from verispec.server.choices import Choice, Commit
from verispec.server.core import Core
from verispec.server.errors import ApiError, as_api_error, wrong
from verispec.server.http import EVENTS, Received, Reply, event, json_reply
from verispec.server.structure import structured, wanted_answer
from verispec.server.tool_use import ToolUse
from verispec.types import SamplingParams

DONE = b"data: [DONE]\n\n"
_LAST_EVENT = "Last-Event-ID"
_encode = msgspec.json.encode
_EVENT_ID = re.compile(r"(\d{1,4})\.(\d{1,9})")
# What makes ids differ. Batches derive it from the line, so that the same line has the same ids.
ID_SOURCE: ContextVar[Callable[[], str]] = ContextVar("ID_SOURCE", default=lambda: secrets.token_hex(12))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How an interface writes answers. `plain` writes the usual frame of text alone, from its ends; `opening` is what
    the first frame of a choice holds.
    """

    kind: str
    id_prefix: str
    whole: Callable[[Answer, int, Choice], dict[str, Any]]
    frame: Callable[[Answer, Commit], dict[str, Any]]
    plain: tuple[bytes, bytes]
    opening: Mapping[str, Any]
    has_details: bool = False  # whether frames hold more than text


def new_id(prefix: str) -> str:
    """An id for people and logs; nothing goes by it."""
    return prefix + ID_SOURCE.get()()


async def make_call(
    core: Core,
    body: Sampling,
    received: Received,
    *,
    prompts: list[list[int]],
    params: SamplingParams,
    stream: bool | None,
    extension: Extension | None,
    tools: ToolUse | None = None,
    **more: Any,
) -> Call:
    """The call of a request whose prompts are tokens by now; `more` are further fields of it."""
    asked = extension or Extension()
    if stream and params.prompt_logprobs is not None:
        raise wrong("prompt_logprobs", "a stream has none of its prompt; they come with whole answers")
    event_id = received.header("last-event-id")
    seen = {} if event_id is None else _seen(event_id, params, num_choices=len(prompts) * params.n)
    if seen and not stream:
        raise ApiError(400, f"{_LAST_EVENT} continues a stream, and stream is not true", param="stream")
    if seen and body.seed is None:
        raise ApiError(400, f"{_LAST_EVENT} needs the seed that the stream began with", param="seed")
    given = [len(ids) for ids in asked.committed_ids or [[]] * params.n]
    structure = await structured(core.llm, params, wanted_answer(body), tools)
    return Call(
        prompts=prompts,
        params=structure.params,
        extension=asked,
        tenant=received.tenant,
        keeps_stop=bool(body.include_stop_str_in_output),
        skip={i: max(0, num_tokens - given[i % params.n]) for i, num_tokens in seen.items()},
        tools=structure.tools,
        grammar=structure.grammar,
        **more,
    )


def _seen(event_id: str, params: SamplingParams, *, num_choices: int) -> dict[int, int]:
    """Tokens that the client has, by choice, going by the last frame it saw."""
    name = _LAST_EVENT
    found = [_EVENT_ID.fullmatch(part) for part in event_id.split(",")]
    if not event_id or not all(found) or len(found) > num_choices:
        raise ApiError(400, f"{name} must be the id of a frame of this request, such as 0.17", param=name)
    if not params.deterministic:
        raise ApiError(400, f"{name} continues deterministic answers only", param="verispec.deterministic")
    seen = {int(match[1]): int(match[2]) for match in found if match is not None}
    if max(seen) >= num_choices:
        raise ApiError(400, f"{name} names a choice that this request does not have", param=name)
    return seen


async def reply(answer: Answer, body: Completing, shape: Shape, model: str) -> Reply:
    """The answer, whole or as frames."""
    head = {
        "id": new_id(shape.id_prefix),
        "object": shape.kind,
        "created": answer.created,
        "model": model,
        "system_fingerprint": answer.core.fingerprint,
    }
    if body.stream:
        frames = _frames(answer, shape, head, body.stream_options or StreamOptions())
        return Reply(frames, content_type=EVENTS, on_end=answer.close)
    return json_reply(await answer.whole(lambda: _whole(answer, shape, head)))


def _whole(answer: Answer, shape: Shape, head: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **head,
        "choices": [shape.whole(answer, i, choice) for i, choice in enumerate(answer.choices)],
        "usage": answer.usage(),
        "metrics": answer.metrics(),
        "verispec": answer.extensions(),
    }


class Told:
    """How many tokens of each choice a client has, those included that it had before, as frames go out."""

    def __init__(self, answer: Answer) -> None:
        self._ends = [answer.begun_len(i) for i in range(len(answer.choices))]

    def __len__(self) -> int:
        return sum(self._ends)

    def take(self, commit: Commit) -> str:
        """The id of the frame that has this commit: a reconnect continues behind it."""
        self._ends[commit.choice] = commit.end
        if len(self._ends) == 1:
            return f"0.{commit.end}"
        return ",".join(f"{i}.{end}" for i, end in enumerate(self._ends))


async def _frames(answer: Answer, shape: Shape, head: dict[str, Any], options: StreamOptions) -> AsyncIterator[bytes]:
    head["object"] += ".chunk" if shape.kind == "chat.completion" else ""
    has_usage = bool(options.include_usage or options.continuous_usage_stats)
    is_plain = not (shape.has_details or has_usage or answer.call.extension.trace)
    before = _encode({**head, "choices": []})[:-2] + b'{"index":'
    told = Told(answer)
    began = perf_counter()

    def usage() -> dict[str, Any]:
        """With every frame: what it comes to so far, or null where only the last chunk tells."""
        if not has_usage:
            return {}
        return {"usage": answer.usage(len(told)) if options.continuous_usage_stats else None}

    def written(commit: Commit) -> bytes:
        event_id = told.take(commit)
        if is_plain and commit.event.output is None:
            middle, after = shape.plain
            return event(
                b"%s%d%s%s%s" % (before, commit.choice, middle, _encode(commit.text), after), event_id=event_id
            )
        more: dict[str, Any] = usage()
        own: dict[str, Any] = {}
        if answer.call.extension.trace:
            own = {**traced(answer, commit), "ms": round(1000 * (perf_counter() - began), 3)}
        if commit.event.output is not None:
            own |= answer.extension(commit.choice)
        if own:
            more["verispec"] = own
        return event(_encode({**head, "choices": [shape.frame(answer, commit)], **more}), event_id=event_id)

    try:
        if not answer.call.skip:
            for i in range(len(answer.choices)):
                choice = {"index": i, **shape.opening, "logprobs": None, "finish_reason": None}
                yield event(_encode({**head, "choices": [choice], **usage(), "verispec": answer.extension()}))
        async for commits in answer.commits():
            if found := b"".join(map(written, commits)):
                yield found
        if options.include_usage:
            last = {**head, "choices": [], "usage": answer.usage(), "metrics": answer.metrics()}
            yield event(_encode(last))
    except Exception as error:
        yield event(_encode(as_api_error(error).body()))
    yield DONE


def traced(answer: Answer, commit: Commit) -> dict[str, Any]:
    """Where the tokens of a frame came from, for whoever asked for a trace."""
    text, event_ = answer.core.llm.tokenizer.token_text, commit.event
    found: dict[str, Any] = {
        "pieces": list(commit.pieces),
        "accepted": event_.num_accepted,
        "rejected": [text(token_id) for token_id in event_.rejected_ids],
    }
    if (trace := event_.trace) is not None and len(trace.draft):
        found["draft"] = {
            "drafter": trace.drafter,
            "tokens": [text(token_id) for token_id in trace.draft.token_ids],
            "parents": list(trace.draft.parents),
            "path": list(trace.verdict.path),
            "draft_probabilities": [round(p, 4) for p in trace.draft.probabilities],
            "target_probabilities": [round(p, 4) for p in trace.target_probabilities],
        }
    return found
