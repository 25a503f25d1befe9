"""Who may ask: one ASGI layer in front of everything, which denies unless a rule allows.

With keys, every path but the open ones needs one. Without, a request must name a loopback host, so that no web page can
reach the server under a name of its own (DNS rebinding), and a body must be JSON, which a page of another origin cannot
send unasked. Keys are compared by their hashes in constant time, and never logged.
"""

from __future__ import annotations

import hashlib
import hmac

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from verispec.server.errors import ApiError
from verispec.server.http import error_reply, send_reply
from verispec.server.settings import Settings, is_loopback

OPEN_PATHS = frozenset(("/health", "/ready", "/", "/favicon.ico"))
OPEN_FOLDER = "/static/"
_TENANT_DIGITS = 32
_SECURITY_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
}


class Guard:
    """Lets requests through to `app`, with the tenant they belong to, or answers them itself."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._settings = settings
        self._digests = [hashlib.sha256(key.encode()).digest() for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        answer = self._with_headers(send, headers.get("origin"))
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await self._preflight(scope, headers, answer)
            return
        try:
            tenant = self._tenant(scope, headers)
            self._check_browser(scope, headers)
        except ApiError as error:
            await send_reply(answer, error_reply(error, scope))
            return
        scope.setdefault("state", {})["tenant"] = tenant
        await self._app(scope, receive, answer)

    def _tenant(self, scope: Scope, headers: Headers) -> str:
        """Whose request it is. Raises 401 without a valid key where one is needed."""
        path = scope["path"]
        if not self._digests:
            return ""
        given = headers.get("x-api-key") or ""
        scheme, _, rest = headers.get("authorization", "").partition(" ")
        if not given and scheme.lower() == "bearer":
            given = rest.strip()
        digest = hashlib.sha256(given.encode("utf-8", "surrogateescape")).digest()
        if sum(hmac.compare_digest(digest, known) for known in self._digests):  # all of them, found or not
            return digest.hex()[:_TENANT_DIGITS]
        if path in OPEN_PATHS or path.startswith(OPEN_FOLDER):
            return ""
        what = "wrong" if given else "missing"
        message = f"the API key is {what}; send it as `Authorization: Bearer KEY`"
        raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def _check_browser(self, scope: Scope, headers: Headers) -> None:
        """Without keys, refuse what a web page of another origin could send."""
        settings = self._settings
        if settings.api_keys or settings.is_insecure:
            return
        if not is_loopback(headers.get("host", "")):
            raise ApiError(403, "without an API key this server answers requests to a loopback host only", code="host")
        origin = headers.get("origin")
        if origin is not None and not self._allows(origin) and not is_loopback(origin.partition("://")[2]):
            raise ApiError(403, "requests from this origin are not allowed; --cors-origin allows it", code="origin")
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if scope["method"] == "POST" and kind != "application/json":
            raise ApiError(415, "the body must be of Content-Type application/json")

    def _allows(self, origin: str) -> bool:
        allowed = self._settings.cors_origins
        return "*" in allowed or origin in allowed

    def _with_headers(self, send: Send, origin: str | None) -> Send:
        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _SECURITY_HEADERS.items():
                    headers[name] = value
                if origin is not None and self._allows(origin):
                    headers["access-control-allow-origin"] = origin
                    headers["access-control-expose-headers"] = "retry-after"
                    headers.add_vary_header("Origin")
            await send(message)

        return answer

    async def _preflight(self, scope: Scope, headers: Headers, send: Send) -> None:
        allowed = self._allows(headers.get("origin", ""))
        found = {
            "access-control-allow-methods": "GET, POST",
            "access-control-allow-headers": headers.get("access-control-request-headers", "")[:1000],
            "access-control-max-age": "600",
        }
        start = {"type": "http.response.start", "status": 204 if allowed else 403}
        listed = [(name.encode(), value.encode()) for name, value in found.items()] if allowed else []
        await send({**start, "headers": listed})
        await send({"type": "http.response.body", "body": b""})
