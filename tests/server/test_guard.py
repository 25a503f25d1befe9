"""Who may ask: keys, hosts, origins; a test walks all routes, so that a new one is closed until somebody opens it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.support.served import Served, chat_body, serving
from verispec.errors import InputError
from verispec.llm import LLM
from verispec.server.app import ROUTES
from verispec.server.settings import Settings, is_loopback

KEYS = ("first-key-123", "second-key-456")
OPEN = {"/health", "/ready", "/", "/static/{name}"}


@pytest.fixture(scope="module")
def keyed(chat_llm: LLM) -> Iterator[Served]:
    with serving(chat_llm, api_keys=KEYS, cors_origins=("https://app.example",)) as server:
        yield server


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
def test_every_route_but_the_open_ones_needs_a_key(keyed: Served, route: object) -> None:
    path = route.path  # type: ignore[attr-defined]
    method = "GET" if route.body is None else "POST"  # type: ignore[attr-defined]
    with httpx.Client(base_url=keyed.url) as client:
        for headers in ({}, {"Authorization": "Bearer wrong-key-000"}, {"x-api-key": KEYS[0][:-1]}):
            answer = client.request(method, path.replace("{name:path}", "x").replace("{name}", "x"), headers=headers)
            if path in OPEN:
                assert answer.status_code != 401
            else:
                assert answer.status_code == 401
                assert answer.json()["error"]["type"] == "authentication_error"
                assert KEYS[0] not in answer.text


@pytest.mark.parametrize("headers", [{"Authorization": f"Bearer {KEYS[0]}"}, {"Authorization": f"bearer {KEYS[1]}"},
                                     {"x-api-key": KEYS[1]}])  # fmt: skip
def test_each_key_opens(keyed: Served, headers: dict[str, str]) -> None:
    with httpx.Client(base_url=keyed.url, headers=headers) as client:
        assert client.get("/v1/models").status_code == 200


def test_paths_cannot_be_disguised(keyed: Served) -> None:
    with httpx.Client(base_url=keyed.url) as client:
        for path in ("//v1/models", "/health/../v1/models", "/static/../v1/models", "/%76%31/models", "/v1/models/"):
            assert client.get(path).status_code in (401, 404), path


def test_tenants_share_no_prefix_cache(keyed: Served) -> None:
    def cached(key: str) -> int:
        body = chat_body("a long prompt that is worth keeping " * 5, max_tokens=2, n=3)
        answer = httpx.post(
            f"{keyed.url}/v1/chat/completions", json=body, headers={"x-api-key": key}, timeout=60
        ).json()
        usage = answer["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert cached(KEYS[0]) == 0
    assert cached(KEYS[0]) > 0  # control: the same key finds it again
    assert cached(KEYS[1]) == 0


def test_tenants_share_no_history_that_drafts_come_from(keyed: Served) -> None:
    """What one key was answered drafts nothing for another, which `usage` would tell."""

    def accepted(key: str) -> int:
        body = chat_body("history", max_tokens=120, ignore_eos=True, verispec={"speculative": {"method": "suffix"}})
        answer = httpx.post(f"{keyed.url}/v1/chat/completions", json=body, headers={"x-api-key": key}, timeout=60)
        found: int = answer.json()["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
        return found

    assert accepted(KEYS[0]) < 30
    assert accepted(KEYS[0]) > 90  # control: the same key drafts from its first answer
    assert accepted(KEYS[1]) < 30


def test_origins_that_are_allowed_and_others(keyed: Served) -> None:
    for origin, allowed in (("https://app.example", True), ("https://evil.example", False)):
        answer = keyed.client.get("/v1/models", headers={"Origin": origin})
        assert answer.headers.get("access-control-allow-origin") == (origin if allowed else None)
        preflight = keyed.client.options(
            "/v1/models", headers={"Origin": origin, "Access-Control-Request-Method": "POST"}
        )
        assert preflight.status_code == (204 if allowed else 403)


def test_without_a_key_no_web_page_reaches_it(served: Served) -> None:
    """DNS rebinding gives the server another host name; simple cross-site requests are no JSON."""
    assert served.client.get("/v1/models", headers={"Host": "evil.example:8000"}).status_code == 403
    assert served.client.get("/v1/models", headers={"Host": "127.0.0.1.evil.example"}).status_code == 403
    assert served.client.get("/v1/models", headers={"Origin": "https://evil.example"}).status_code == 403
    answer = served.client.post("/v1/chat/completions", content=b"{}", headers={"Content-Type": "text/plain"})
    assert answer.status_code == 415
    assert served.client.get("/v1/models", headers={"Host": "localhost:1234"}).status_code == 200


@pytest.mark.parametrize(("host", "expected"), [
    ("localhost", True), ("localhost:80", True), ("127.0.0.1:8000", True), ("127.8.9.1", True), ("[::1]:80", True),
    ("::1", True), ("0.0.0.0", False), ("example.org", False), ("localhost.evil.org", False), ("", False),
    ("127.0.0.1.nip.io", False), ("[::]", False), ("10.0.0.1", False), ("evil@localhost", False),
])  # fmt: skip
def test_which_hosts_are_this_machine(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_an_open_address_needs_a_key() -> None:
    with pytest.raises(InputError, match=r"0\.0\.0\.0 can be reached"):
        Settings(host="0.0.0.0")
    Settings(host="0.0.0.0", api_keys=("long-enough-key",))
    Settings(host="0.0.0.0", is_insecure=True)
    for bad in ({"api_keys": ("short",)}, {"cors_origins": ("evil",)}, {"metrics_prefix": "a b"}, {"port": 99999}):
        with pytest.raises(InputError):
            Settings(**bad)  # type: ignore[arg-type]
