"""How a server is set up: one frozen value, checked where it is made."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from verispec.arguments import check_int, check_number
from verispec.errors import InputError
from verispec.receipt.signing import SigningKey

MAX_BODY_NBYTES = 8 * 2**20
MAX_HEADER_NBYTES = 32 * 2**10
MAX_HEADERS = 100
_MIN_KEY_CHARS = 8
_PREFIX = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_LOOPBACK_NAMES = ("localhost", "ip6-localhost")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Times are in seconds.

    Without `api_keys` a server answers requests that name a loopback host, and no others unless it `is_insecure`. Every
    key is a tenant: prefix caches and receipts are not shared. `timeout` bounds a whole request, `body_timeout` the
    time its body may take to come, `write_timeout` the time in which a client must take some of what is sent to it,
    `drain` the time that running requests have when the server is told to stop. Streams without a frame for `ping`
    seconds get a comment.
    `max_pending` bounds the events of a stream that its reader has not taken. Receipts are signed with `signing_key`.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    is_insecure: bool = False
    max_running: int = 32
    max_waiting: int = 256
    timeout: float = 600.0
    body_timeout: float = 20.0
    header_timeout: float = 10.0
    write_timeout: float = 30.0
    ping: float = 15.0
    drain: float = 30.0
    max_pending: int = 1024
    max_body_nbytes: int = MAX_BODY_NBYTES
    max_receipts: int = 1000
    metrics_prefix: str = "verispec"
    signing_key: SigningKey | None = None

    def __post_init__(self) -> None:
        check_int("port", self.port, 0, 65535)
        check_int("max_running", self.max_running, 1, 2**20)
        check_int("max_waiting", self.max_waiting, 0, 2**20)
        for name in ("timeout", "body_timeout", "header_timeout", "write_timeout", "ping"):
            check_number(name, getattr(self, name), 0, 1e6, low_open=True)
        check_number("drain", self.drain, 0, 1e6)
        if not _PREFIX.fullmatch(self.metrics_prefix):
            raise InputError(f"metrics_prefix must be a name such as vllm, not {self.metrics_prefix!r}")
        for key in self.api_keys:
            if len(key) < _MIN_KEY_CHARS or not key.isascii() or not key.isprintable() or " " in key:
                raise InputError(f"api_key must be at least {_MIN_KEY_CHARS} printable ASCII characters without spaces")
        for origin in self.cors_origins:
            if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
                raise InputError(f"cors_origin must be * or like https://example.org, not {origin!r}")
        if not (self.api_keys or self.is_insecure or is_loopback(self.host)):
            raise InputError(
                f"host {self.host} can be reached from other machines: give an API key (--api-key), or --insecure to "
                "serve everybody"
            )

    @property
    def max_samples(self) -> int:
        """Samples that may run or wait at one time."""
        return self.max_running + self.max_waiting


def is_loopback(host: str) -> bool:
    """Whether a name or an address, perhaps with a port, means this machine and can mean no other."""
    bare = re.fullmatch(r"\[(.+)\](?::\d*)?|([^:\[\]]+)(?::\d*)?", host)
    name = (bare[1] or bare[2]).lower() if bare is not None else host
    if name in _LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
