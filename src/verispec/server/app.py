"""The routes, put together: one table, from which the application and its description are made."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from importlib import resources
from typing import Any, NamedTuple

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute
from starlette.types import ASGIApp

from verispec.server import api, audits, ops, tokens
from verispec.server.chat import chat_completions
from verispec.server.completions import completions
from verispec.server.core import Core
from verispec.server.errors import ApiError, as_api_error
from verispec.server.generate import generate, inference_generate
from verispec.server.guard import OPEN_FOLDER, Guard
from verispec.server.http import Endpoint, Received, Reply, error_reply, json_reply
from verispec.server.log import RequestLog
from verispec.server.messages import count_tokens, messages
from verispec.server.openapi import describe
from verispec.server.responses import responses

logger = logging.getLogger(__name__)
_TYPES = {"html": b"text/html; charset=utf-8", "css": b"text/css", "js": b"text/javascript", "svg": b"image/svg+xml"}


class Route(NamedTuple):
    """A path, what answers it, and the type of its body, if it has one."""

    path: str
    handler: Callable[[Core, Received], Awaitable[Reply]]
    body: type[msgspec.Struct] | None = None

    @property
    def generates(self) -> bool:
        """Whether it hands requests to the engine, and can stream what comes of them."""
        return self.body is not None and "stream" in self.body.__struct_fields__


async def page_file(core: Core, received: Received) -> Reply:
    """A file of the page."""
    name = received.request.path_params.get("name", "index.html")
    found = PAGE.get(name)
    if found is None:
        raise ApiError(404, "there is no such page")
    return Reply(found, content_type=_TYPES[name.rpartition(".")[2]], headers={"Cache-Control": "no-cache"})


async def openapi(core: Core, received: Received) -> Reply:
    """The description of all routes."""
    return json_reply(describe(ROUTES))


def _page_files() -> dict[str, bytes]:
    """Read once: no name that a client sends is ever a path."""
    folder = resources.files("verispec.server").joinpath("page")
    return {f.name: f.read_bytes() for f in folder.iterdir() if f.name.rpartition(".")[2] in _TYPES}


PAGE = _page_files()
ROUTES = (
    Route("/v1/chat/completions", chat_completions, api.ChatRequest),
    Route("/v1/completions", completions, api.CompletionRequest),
    Route("/v1/responses", responses, api.ResponsesRequest),
    Route("/v1/messages", messages, api.MessagesRequest),
    Route("/v1/messages/count_tokens", count_tokens, api.CountRequest),
    Route("/v1/models", ops.models),
    Route("/v1/models/{name:path}", ops.model),
    Route("/generate", generate, api.GenerateRequest),
    Route("/inference/v1/generate", inference_generate, api.TokensRequest),
    Route("/tokenize", tokens.tokenize, api.TokenizeRequest),
    Route("/tokenizer_info", tokens.tokenizer_info),
    Route("/detokenize", tokens.detokenize, api.DetokenizeRequest),
    Route("/apply-template", tokens.apply_template, api.TemplateRequest),
    Route("/verispec/receipts/{name}", audits.receipt),
    Route("/verispec/keys", audits.keys),
    Route("/verispec/replay", audits.replay_receipt, api.ReplayRequest),
    Route("/verispec/check", audits.check, api.ReplayRequest),
    Route("/health", ops.health),
    Route("/ready", ops.ready),
    Route("/metrics", ops.metrics),
    Route("/version", ops.version),
    Route("/openapi.json", openapi),
    Route("/", page_file),
    Route(OPEN_FOLDER + "{name}", page_file),
)


def _admit_all() -> None:
    """What generates nothing needs no room."""


def make_app(core: Core) -> ASGIApp:
    """The server as an ASGI application."""
    settings = core.settings

    def on_error(kind: type[msgspec.Struct] | None, error: Exception) -> ApiError:
        found = as_api_error(error, fields=frozenset(kind.__struct_fields__ if kind is not None else ()))
        if found.status >= 500:
            logger.error("%s", found.message, exc_info=None if isinstance(error, ApiError) else error)
        return found

    routes = [
        StarletteRoute(
            route.path,
            Endpoint(
                partial(route.handler, core),
                admit=core.check_room if route.generates else _admit_all,
                max_nbytes=settings.max_body_nbytes,
                body_timeout=settings.body_timeout,
                ping_seconds=settings.ping,
                on_error=partial(on_error, route.body),
            ),
            methods=["GET"] if route.body is None else ["POST"],
        )
        for route in ROUTES
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _http_error})
    app.router.redirect_slashes = False
    return RequestLog(Guard(app, settings))


async def _http_error(request: Request, error: Any) -> Response:
    """What no route answers."""
    said = "there is no such path" if error.status_code == 404 else str(error.detail)
    reply = error_reply(ApiError(error.status_code, said), request.scope)
    headers = {**(error.headers or {}), "content-type": "application/json"}
    return Response(reply.body, status_code=reply.status, headers=headers)
