"""The OpenAPI description of the routes, made from the types of their bodies."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from verispec import __version__

if TYPE_CHECKING:
    from verispec.server.app import Route

_TEMPLATE = "#/components/schemas/{name}"
_TEXT_PATHS = {"/metrics": "text/plain", "/": "text/html"}
_ERRORS = {
    "400": "The request is wrong; `param` names the field.",
    "401": "The API key is missing or wrong.",
    "403": "The host or the origin is not allowed.",
    "404": "There is no such model or thing.",
    "405": "Another method is needed.",
    "408": "The body came too slowly.",
    "413": "The body is too long.",
    "415": "The body must be JSON.",
    "429": "The queue is full; Retry-After says when to try again.",
    "500": "The engine failed.",
    "503": "The server is stopping, or its engine has failed.",
    "504": "The answer took too long; `partial` is what there was.",
}


def describe(routes: Iterable[Route]) -> dict[str, Any]:
    """OpenAPI 3.1."""
    routes = list(routes)
    bodies = [route.body for route in routes if route.body is not None]
    _, components = msgspec.json.schema_components(bodies, ref_template=_TEMPLATE)
    components["Error"] = {
        "type": "object",
        "required": ["error"],
        "properties": {"error": {"type": "object", "required": ["message", "type"]}},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "verispec", "version": __version__},
        "paths": {_plain_path(route.path): _path(route) for route in routes},
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _plain_path(path: str) -> str:
    return re.sub(r":\w+}", "}", path)


def _path(route: Route) -> dict[str, Any]:
    kind = _TEXT_PATHS.get(route.path, "application/json")
    error = {"application/json": {"schema": {"$ref": _TEMPLATE.format(name="Error")}}}
    operation: dict[str, Any] = {
        "operationId": route.handler.__name__,
        "summary": (route.handler.__doc__ or "").strip(),
        "responses": {
            "200": {"description": "The answer.", "content": {kind: {}}},
            **{status: {"description": text, "content": error} for status, text in _ERRORS.items()},
        },
    }
    names = re.findall(r"{(\w+)", route.path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if route.body is None:
        return {"get": operation}
    schema = {"$ref": _TEMPLATE.format(name=route.body.__name__)}
    if route.generates:
        operation["responses"]["200"]["content"]["text/event-stream"] = {}
    operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"post": operation}
