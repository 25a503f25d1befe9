"""What the server writes to its log: one line per request, and what went wrong. Never keys, prompts or answers."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_requests = logging.getLogger("verispec.requests")
_MAX_PATH_CHARS = 200


def set_up(level: str, form: str) -> None:
    """Send the library's log to stderr."""
    handler = logging.StreamHandler()
    plain = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(_JsonFormatter() if form == "json" else plain)
    logger = logging.getLogger("verispec")
    logger.handlers = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


class _JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """The record's time, level and message, and the fields of a request."""
        found: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "request", {}),
        }
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found)


class RequestLog:
    """Notes every request that `app` answers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _requests.isEnabledFor(logging.INFO):
            await self._app(scope, receive, send)
            return
        start, status = time.monotonic(), 0

        async def noted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            path = "".join(c if c.isprintable() else "?" for c in scope["path"][:_MAX_PATH_CHARS])
            found = {"method": scope["method"], "path": path, "status": status}
            found["milliseconds"] = round(1000 * (time.monotonic() - start))
            _requests.info("%(method)s %(path)s %(status)s %(milliseconds)s ms", found, extra={"request": found})
