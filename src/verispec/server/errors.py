"""What a client is told when something is wrong: a status and one sentence, in the form its interface expects."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from verispec.async_llm import SlowReaderError
from verispec.errors import BackendDeadError, DeterminismError, InputError, QueueFullError, VerispecError

RETRY_SECONDS = (1, 2)  # one of them: whoever is refused together should not come back together
_KINDS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error",
    429: "rate_limit_error", 500: "server_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
# Fields of the library that clients know by another name.
_API_NAMES = {"stop_ids": "stop_token_ids", "alternatives": "top_logprobs", "prediction_ids": "prediction"}
# Where a request has what sentences of the library begin with.
_PLACES = {
    "committed_ids": "verispec.committed_ids", "deterministic": "verispec.deterministic",
    "drafter": "verispec.speculative.method", "accept": "verispec.speculative.accept",
    "tree": "verispec.speculative.tree",
}  # fmt: skip
# How sentences about the prompt begin, and the fields that may hold it: a request has one of them.
_ABOUT_PROMPT = re.compile(r"the prompt (?P<is_long>has \d+ tokens)?|token id |scoring needs ")
_PROMPT_FIELDS = ("messages", "input", "prompt", "token_ids", "input_ids")


class ApiError(Exception):
    """An answer that is an error. `partial` is what was generated before it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        partial: Any = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.partial = partial

    @property
    def kind(self) -> str:
        """The type that clients tell errors apart by."""
        return _KINDS.get(self.status, "invalid_request_error")

    def body(self, *, anthropic: bool = False) -> dict[str, Any]:
        """As JSON has it, in OpenAI's form or in Anthropic's."""
        more = {} if self.partial is None else {"partial": self.partial}
        if anthropic:
            kind = "api_error" if self.status == 500 else self.kind
            return {"type": "error", "error": {"type": kind, "message": self.message, "param": self.param}, **more}
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error, **more}


def as_api_error(error: Exception, *, fields: frozenset[str] = frozenset()) -> ApiError:
    """What an exception means to a client; `fields` are names that its sentence may begin with."""
    match error:
        case ApiError():
            return error
        case InputError() | DeterminismError():
            return _about_input(str(error), fields)
        case QueueFullError():
            return ApiError(
                429, str(error), code="queue_full", headers={"Retry-After": str(random.choice(RETRY_SECONDS))}
            )
        case SlowReaderError():
            return ApiError(408, str(error), code="slow_reader")
        case BackendDeadError():
            return ApiError(503, str(error), code="engine_dead")
        case VerispecError():
            return ApiError(500, str(error), code="engine_error")
        case _:
            return ApiError(500, "the server failed to answer this request", code="internal_error")


def _about_input(message: str, fields: frozenset[str]) -> ApiError:
    if (about := _ABOUT_PROMPT.match(message)) is None:
        return ApiError(400, _in_api_names(message), param=_named(message, fields))
    param = next((name for name in _PROMPT_FIELDS if name in fields), None)
    return ApiError(400, message, param=param, code="context_length_exceeded" if about["is_long"] else None)


def wrong(place: str, message: str) -> ApiError:
    """400 for what is wrong at a place of the request."""
    return ApiError(400, f"{place}: {message}", param=place)


def stopping() -> ApiError:
    """What is told of work that the server ends because it is stopping."""
    return ApiError(503, "the server ended the request: it is stopping", code="aborted")


@contextmanager
def renamed(names: Mapping[str, str], fields: Iterable[str] = ()) -> Iterator[None]:
    """Errors of another interface's call, whose `fields` sentences begin with, named as this one has them: parts of
    `param`, one after the other.
    """
    try:
        yield
    except (ApiError, InputError) as raised:
        error = as_api_error(raised, fields=frozenset(fields))
        if (param := error.param) is not None:
            for theirs, ours in names.items():
                param = param.replace(theirs, ours, 1)
            error.message = error.message.replace(str(error.param), param, 1)
            error.param = param
        raise error from raised


def _in_api_names(message: str) -> str:
    return re.sub(r"^\w+", lambda match: _API_NAMES.get(match[0], match[0]), message)


def _named(message: str, fields: frozenset[str]) -> str | None:
    """The field that a sentence is about: its first word, with what follows in brackets and dots, if it is one."""
    match = re.match(r"(?:unknown )?(\w+)((?:\[\d+\]|\.\w+)*)", message)
    if match is None:
        return None
    name = _API_NAMES.get(match[1]) or _PLACES.get(match[1], match[1])
    return name + match[2] if name.partition(".")[0] in fields else None
