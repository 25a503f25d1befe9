"""Receipts over HTTP: kept for their key, replayed beside others, and checked under other circumstances."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.server.test_load import is_idle, wait_for
from tests.support.served import Served, chat_body, serving
from verispec.llm import LLM
from verispec.receipt import parse, replay
from verispec.receipt.rerun import Redrawing
from verispec.server import audits

KEYS = ("key-of-one-1", "key-of-two-2")


@pytest.fixture(scope="module")
def keyed(chat_llm: LLM) -> Iterator[Served]:
    with serving(chat_llm, api_keys=KEYS, max_receipts=3) as server:
        yield server


def receipt_of(served: Served, content: str = "hello", **fields: Any) -> tuple[str, dict[str, Any]]:
    receipt_id = served.chat(content, verispec={"receipt": True}, **fields)["verispec"]["receipt"]
    answer = served.client.get(f"/verispec/receipts/{receipt_id}")
    assert answer.status_code == 200
    return receipt_id, answer.json()


def test_a_receipt_over_http_is_the_librarys(keyed: Served, chat_llm: LLM) -> None:
    _, receipt = receipt_of(keyed, temperature=1.0)
    assert replay(chat_llm, parse(json.dumps(receipt))).reproduced


def test_only_the_key_that_made_it_reads_it(keyed: Served) -> None:
    receipt_id, _ = receipt_of(keyed)
    for path in (f"/verispec/receipts/{receipt_id}", "/verispec/receipts/rcpt-0", "/verispec/receipts/..%2f..%2fetc"):
        assert httpx.get(keyed.url + path, headers={"x-api-key": KEYS[1]}).status_code == 404


def test_the_oldest_is_forgotten(keyed: Served) -> None:
    first, _ = receipt_of(keyed, "first")
    for i in range(3):
        receipt_of(keyed, f"later {i}")
    assert keyed.client.get(f"/verispec/receipts/{first}").status_code == 404


@pytest.mark.parametrize("fields", [{"temperature": 1.0}, {"temperature": 0}, {"max_tokens": None, "stop": ["e"]}])
def test_replay_finds_it_again_and_finds_what_was_changed(keyed: Served, fields: dict[str, Any]) -> None:
    receipt_id, receipt = receipt_of(keyed, **fields)
    for body in ({"id": receipt_id}, {"receipt": receipt}):
        found = keyed.post("/verispec/replay", body).json()
        assert found["reproduced"] is True, found
    ids = receipt["output"]["token_ids"]
    place = len(ids) // 2
    ids[place] = (ids[place] + 1) % 250
    found = keyed.post("/verispec/replay", {"receipt": receipt}).json()
    assert found["reproduced"] is False
    assert found["edited"] is True
    position = len(receipt["prompt"]["token_ids"]) + place
    assert found["first_token_difference"]["position"] == position


def test_check_gives_one_digest_whatever_the_circumstances(keyed: Served, chat_llm: LLM) -> None:
    receipt_id, receipt = receipt_of(keyed, temperature=1.0, ignore_eos=True)
    found = keyed.post("/verispec/check", {"id": receipt_id}).json()
    assert found["equal"] is True
    names = [run["circumstance"] for run in found["runs"]]
    assert {"drafter none", "drafter suffix", "in a crowd", "without cached prefix", "K/V lost half-way"} <= set(names)
    receipt["output"]["token_ids"][0] ^= 1  # control
    assert keyed.post("/verispec/check", {"receipt": receipt}).json()["equal"] is False
    assert not keyed.core.num_samples


@pytest.mark.parametrize(("max_waiting", "is_crowded"), [(0, False), (1, True)])
def test_a_small_server_checks_in_a_crowd_that_it_can_take(chat_llm: LLM, max_waiting: int, is_crowded: bool) -> None:
    with serving(chat_llm, max_running=1, max_waiting=max_waiting) as small:
        receipt_id, _ = receipt_of(small)
        found = small.post("/verispec/check", {"id": receipt_id}).json()
    assert found["equal"] is True
    assert ("in a crowd" in [run["circumstance"] for run in found["runs"]]) == is_crowded


@pytest.mark.parametrize("body", [{}, {"receipt": {}}, {"receipt": {"format": 99}}, {"receipt": {}, "id": "x"}])
def test_what_is_no_receipt_is_refused(keyed: Served, body: dict[str, Any]) -> None:
    for path in ("/verispec/replay", "/verispec/check"):
        answer = keyed.post(path, body)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"]


def test_requests_that_can_have_no_receipt(keyed: Served) -> None:
    extension = {"receipt": True, "deterministic": False}
    assert keyed.post("/v1/chat/completions", chat_body(verispec=extension)).status_code == 400


@pytest.mark.parametrize("num_given", [1, 40, 79])
def test_a_receipt_of_a_continued_answer_tells_what_was_given(keyed: Served, num_given: int) -> None:
    """Given tokens are marked; the drawn ones, and what they were drawn from, are found again or found changed."""
    fields: dict[str, Any] = {"max_tokens": 80, "temperature": 1.0, "ignore_eos": True}
    _, whole = receipt_of(keyed, **fields)
    ids = whole["output"]["token_ids"]
    answer = keyed.chat(**fields, verispec={"receipt": True, "committed_ids": [ids[:num_given]]})
    receipt_id = answer["verispec"]["receipt"]
    receipt = keyed.client.get(f"/verispec/receipts/{receipt_id}").json()
    assert receipt["output"]["token_ids"] == ids
    assert receipt["output"]["num_given"] == num_given
    assert len(receipt["output"]["logprob_digests"]) == -(-(80 - num_given) // 32)
    found = keyed.post("/verispec/replay", {"id": receipt_id}).json()
    assert (found["reproduced"], found["num_equal"]) == (True, 80)
    assert f"the first {num_given} tokens" in found["notes"][0]
    assert keyed.post("/verispec/check", {"id": receipt_id}).json()["equal"] is True
    receipt["output"]["token_ids"][79] ^= 1
    found = keyed.post("/verispec/replay", {"receipt": receipt}).json()
    assert (found["reproduced"], found["edited"]) == (False, True)
    assert found["first_token_difference"]["position"] == len(receipt["prompt"]["token_ids"]) + 79


def test_the_library_replays_a_continued_answer(keyed: Served, chat_llm: LLM) -> None:
    given = [5, 6, 7]
    answer = keyed.chat(temperature=1.0, ignore_eos=True, verispec={"receipt": True, "committed_ids": [given]})
    receipt = keyed.client.get(f"/verispec/receipts/{answer['verispec']['receipt']}").json()
    result = replay(chat_llm, parse(json.dumps(receipt)))
    assert result.reproduced, result
    receipt["output"]["num_given"] = 2  # control: the third was given, not drawn
    assert not replay(chat_llm, parse(json.dumps(receipt))).agrees


def test_audits_are_limited(keyed: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    receipt_id, _ = receipt_of(keyed)
    monkeypatch.setattr("verispec.server.audits._MAX_AUDITS", 0)
    assert keyed.post("/verispec/replay", {"id": receipt_id}).status_code == 429


AUDITS = ("/verispec/replay", "/verispec/check")


@pytest.fixture(scope="module")
def long_receipt(keyed: Served) -> dict[str, Any]:
    """Of an answer that takes much longer to draw again than the tests of it wait."""
    return receipt_of(keyed, max_tokens=900, ignore_eos=True)[1]


@pytest.fixture
def slow_steps(chat_llm: LLM, long_receipt: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    step = chat_llm.engine.step

    def slow() -> Any:
        time.sleep(0.05)
        return step()

    monkeypatch.setattr(chat_llm.engine, "step", slow)


@contextmanager
def sent(served: Served, path: str, body: dict[str, Any]) -> Iterator[None]:
    """A client that leaves at the end of the block."""
    host, port = served.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        sock.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        yield


@pytest.mark.parametrize("path", AUDITS)
def test_an_audit_ends_with_its_client(
    served: Served, path: str, long_receipt: dict[str, Any], slow_steps: None
) -> None:
    for _ in range(8):  # more than may run at one time
        with sent(served, path, {"receipt": long_receipt}):
            wait_for(lambda: served.core.num_samples and served.core.llm.status().num_running)
        wait_for(lambda: is_idle(served), 5)


def test_what_is_prepared_for_a_client_that_left_still_counts(
    served: Served, long_receipt: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads cannot be ended: whoever comes and leaves must not fill them with work that nobody counts."""
    is_free = Future[None]()

    def slow(*args: Any, **options: Any) -> Redrawing:
        is_free.result(20)
        return Redrawing(*args, **options)

    monkeypatch.setattr(audits, "Redrawing", slow)
    for count in range(1, audits._MAX_AUDITS + 1):
        with sent(served, "/verispec/replay", {"receipt": long_receipt}):
            wait_for(lambda count=count: served.core.num_samples == count)
    time.sleep(0.2)  # until the server knows that they left
    assert served.core.num_samples == audits._MAX_AUDITS
    assert served.post("/verispec/replay", {"receipt": long_receipt}).status_code == 429
    is_free.set_result(None)
    wait_for(lambda: is_idle(served), 5)
    monkeypatch.undo()
    assert served.post("/verispec/replay", {"receipt": long_receipt}).json()["reproduced"] is True


@pytest.mark.parametrize("path", AUDITS)
def test_an_audit_may_take_no_longer_than_a_request(
    chat_llm: LLM, path: str, long_receipt: dict[str, Any], slow_steps: None
) -> None:
    with serving(chat_llm, timeout=0.5) as served:
        answer = served.post(path, {"receipt": long_receipt})
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        wait_for(lambda: is_idle(served), 5)


@pytest.mark.parametrize("path", AUDITS)
def test_stopping_ends_audits(chat_llm: LLM, path: str, long_receipt: dict[str, Any], slow_steps: None) -> None:
    with ThreadPoolExecutor(1) as pool:
        with serving(chat_llm, drain=0.3) as served:
            asked = pool.submit(served.post, path, {"receipt": long_receipt})
            wait_for(lambda: served.core.num_samples)
            start = time.monotonic()
        assert time.monotonic() - start < 5
        answer = asked.result(5)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "aborted")
