"""Under load and at the end: equal bytes in any company, full queues, gone and slow clients, timeouts, stopping."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.support.held import fail_once
from tests.support.served import Served, chat_body, frames, serving
from verispec.llm import LLM
from verispec.server import ops

CHAT = "/v1/chat/completions"
# One token per step, whatever was asked before.
ENDLESS: dict[str, Any] = {
    "max_tokens": 900, "ignore_eos": True, "logprobs": True, "top_logprobs": 1, "verispec": {"speculative": False},
}  # fmt: skip


def wait_for(what: Any, seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.01)


def is_idle(served: Served) -> bool:
    status = served.core.llm.status()
    return status.num_running + status.num_waiting + served.core.num_samples == 0


async def answers(served: Served, bodies: list[dict[str, Any]]) -> list[Any]:
    """All at once; of streams, all frames."""
    async with httpx.AsyncClient(base_url=served.url, timeout=60, limits=httpx.Limits(max_connections=100)) as client:

        async def one(body: dict[str, Any]) -> Any:
            answer = await client.post(CHAT, json=body)
            assert answer.status_code == 200, answer.text
            return [f.data for f in frames(iter(answer.text.split("\n")))] if body.get("stream") else answer.json()

        return await asyncio.gather(*map(one, bodies))


def said(answer: Any) -> tuple[Any, ...]:
    """What must be equal to the byte: text, ids, log-probabilities, finish, digest, fingerprint."""
    if isinstance(answer, dict):
        (choice,) = answer["choices"]
        entries = choice["logprobs"]["content"]
        text, ids, finish = choice["message"]["content"], choice["token_ids"], choice["finish_reason"]
        return text, ids, entries, finish, answer["verispec"]["digest"], answer["system_fingerprint"]
    chunks = [chunk["choices"][0] for chunk in answer[1:-1]]
    return (
        "".join(c["delta"]["content"] for c in chunks),
        [i for c in chunks for i in c["token_ids"]],
        [e for c in chunks for e in c["logprobs"]["content"]],
        chunks[-1]["finish_reason"],
        answer[-2]["verispec"]["digest"],
        answer[-2]["system_fingerprint"],
    )


def test_a_request_gets_the_same_bytes_alone_and_in_any_company(served: Served) -> None:
    watched = chat_body("watched", logprobs=True, top_logprobs=2, return_token_ids=True, max_tokens=24)
    (alone,) = asyncio.run(answers(served, [watched]))
    others = [
        chat_body(f"other {i}" * (1 + i % 5), seed=i, max_tokens=5 + i % 40, temperature=i % 3 / 2,
                  verispec={"deterministic": i % 2 == 0}, stream=i % 3 == 0)
        for i in range(64)
    ]  # fmt: skip
    crowd = [*others[:30], watched, *others[30:], {**watched, "stream": True}]
    found = asyncio.run(answers(served, crowd))
    assert said(found[30]) == said(alone)
    assert said(found[-1]) == said(alone)
    (control,) = asyncio.run(answers(served, [{**watched, "seed": 8}]))
    assert said(control)[:3] != said(alone)[:3]


def test_a_second_server_gives_the_same_bytes(served: Served, chat_llm: LLM) -> None:
    body = chat_body(logprobs=True, return_token_ids=True)
    first = said(served.post(CHAT, body).json())
    with serving(chat_llm) as other:
        assert said(other.post(CHAT, body).json()) == first


@pytest.fixture
def slow_steps(chat_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose requests last long enough to be looked at."""
    step = chat_llm.engine.step

    def slow() -> Any:
        time.sleep(0.03)
        return step()

    monkeypatch.setattr(chat_llm.engine, "step", slow)


def test_a_full_queue_is_429_at_once(chat_llm: LLM, slow_steps: None) -> None:
    with serving(chat_llm, max_running=1, max_waiting=1) as served:
        with served.client.stream("POST", CHAT, json=chat_body(stream=True, n=2, **ENDLESS)) as running:
            lines = running.iter_lines()
            next(lines)
            times = []
            for _ in range(20):
                start = time.monotonic()
                answer = served.post(CHAT, chat_body())
                times.append(time.monotonic() - start)
                assert answer.status_code == 429
                assert int(answer.headers["retry-after"]) >= 1
                assert answer.json()["error"]["type"] == "rate_limit_error"
            assert sorted(times)[5] < 0.05, "none waits for a step of 0.1 s"
            assert served.client.get("/health").status_code == 200
        wait_for(lambda: is_idle(served))
        assert served.post(CHAT, chat_body()).status_code == 200
        assert served.post(CHAT, chat_body(n=3)).status_code == 400  # never fits


def test_a_full_queue_refuses_before_the_body_comes(chat_llm: LLM, slow_steps: None) -> None:
    """And does not ask all who were refused together to come back together."""

    def asked_without_body(served: Served, timeout: float) -> bytes:
        host, port = served.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=timeout) as sock:
            head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            sock.sendall(f"{head}Content-Length: 100\r\n\r\n".encode())
            return sock.recv(2**16)

    with serving(chat_llm, max_running=1, max_waiting=0) as served:
        with served.client.stream("POST", CHAT, json=chat_body(stream=True, **ENDLESS)) as running:
            lines = running.iter_lines()  # which end the stream when they are forgotten
            next(lines)
            refused = [asked_without_body(served, 20) for _ in range(40)]
        assert all(answer.startswith(b"HTTP/1.1 429 ") for answer in refused)
        assert {re.search(rb"retry-after: (\d)", answer)[1] for answer in refused} == {b"1", b"2"}  # type: ignore[index]
        wait_for(lambda: is_idle(served))
        with pytest.raises(TimeoutError):  # control: with room, the body is waited for
            asked_without_body(served, 0.5)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_slots(served: Served, stream: bool, slow_steps: None) -> None:
    """The engine is not far in its 900 tokens when the client leaves."""
    host, port = served.url.removeprefix("http://").split(":")
    body = httpx.Request("POST", served.url, json=chat_body(stream=stream, **ENDLESS)).content

    def counted(name: str) -> float:
        lines = served.client.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"verispec:{name} "))

    aborted = counted('request_success_total{finished_reason="abort"}')
    before = served.core.llm.status().totals.committed
    with socket.create_connection((host, int(port))) as sock:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_for(lambda: served.core.llm.status().num_running)
    wait_for(lambda: is_idle(served))
    assert counted('request_success_total{finished_reason="abort"}') == aborted + 1
    assert served.core.llm.status().totals.committed - before < 900
    served.core.llm.engine.check()


def test_stopping_lets_short_requests_end_and_tells_long_ones(chat_llm: LLM, slow_steps: None) -> None:
    results: dict[str, Any] = {}

    def ask(served: Served, name: str, body: dict[str, Any]) -> None:
        results[name] = served.stream(CHAT, body)

    with serving(chat_llm, drain=4.0) as served:
        bodies = {"short": chat_body(stream=True, max_tokens=10, ignore_eos=True),
                  "long": chat_body(stream=True, n=16, **ENDLESS)}  # fmt: skip
        threads = [threading.Thread(target=ask, args=(served, *item)) for item in bodies.items()]
        for thread in threads:
            thread.start()
        wait_for(lambda: served.core.num_samples == 17)
    for thread in threads:
        thread.join(10)
    assert results["short"][-2].data["choices"][0]["finish_reason"] == "length"
    assert results["long"][-2].data["error"]["code"] == "aborted"
    assert chat_llm.generate("abc", {"max_tokens": 2})  # the model lives on


def test_a_second_signal_ends_what_runs_and_tells_it(chat_llm: LLM, slow_steps: None) -> None:
    """Long before the drain is over."""
    results: dict[str, Any] = {}
    with serving(chat_llm, drain=60.0) as served:

        def stream() -> None:
            results["stream"] = served.stream(CHAT, chat_body(stream=True, **ENDLESS))

        threads = [
            threading.Thread(target=stream),
            threading.Thread(target=lambda: results.update(whole=served.post(CHAT, chat_body(**ENDLESS)))),
        ]
        for thread in threads:
            thread.start()
        wait_for(lambda: served.core.num_samples == 2)
        loop = served.server.servers[0].get_loop()
        loop.call_soon_threadsafe(served.server.handle_exit, signal.SIGINT, None)
        wait_for(lambda: served.core.is_draining)
        time.sleep(0.3)
        assert served.core.num_samples == 2  # the control: one signal lets them go on
        loop.call_soon_threadsafe(served.server.handle_exit, signal.SIGINT, None)
        for thread in threads:
            thread.join(10)
    assert results["stream"][-2].data["error"]["code"] == "aborted"
    assert results["whole"].status_code == 503
    assert results["whole"].json()["error"]["code"] == "aborted"


def test_a_failing_pass_is_500_and_the_server_lives(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_once(served.core.llm, monkeypatch)
    answer = served.post(CHAT, chat_body())
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "engine_error"
    assert served.client.get("/health").status_code == 200
    assert served.post(CHAT, chat_body()).status_code == 200


def test_a_step_that_hangs_shows_on_health(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    status = served.core.llm.status()._replace(step_seconds=11.0, predicted_seconds=0.1)
    monkeypatch.setattr(served.core.llm, "status", lambda: status)
    assert served.client.get("/health").status_code == 503
    slow_pass = status._replace(predicted_seconds=2.0)
    monkeypatch.setattr(served.core.llm, "status", lambda: slow_pass)
    assert served.client.get("/health").status_code == 200


def test_steps_that_commit_nothing_show_on_health(
    served: Served, chat_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them is short, and the engine is alive; but there is work, and nothing comes of it."""
    step, is_stalled = chat_llm.engine.step, True

    def stalling() -> Any:
        if not is_stalled:
            return step()
        time.sleep(0.01)
        return []

    monkeypatch.setattr(chat_llm.engine, "step", stalling)
    monkeypatch.setattr(ops, "STALLED_SECONDS", 0.3)
    monkeypatch.setattr(ops, "STALLED_TIMES", 0)
    time.sleep(0.4)
    assert served.client.get("/health").status_code == 200  # nobody asks, so nothing has to be committed
    monkeypatch.setattr(ops, "STALLED_SECONDS", 60)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(served.chat, max_tokens=30, ignore_eos=True)
        wait_for(lambda: served.core.num_samples)
        assert served.client.get("/health").status_code == 200
        monkeypatch.setattr(ops, "STALLED_SECONDS", 0.3)
        wait_for(lambda: served.client.get("/health").status_code == 503)
        assert "nothing was committed" in served.client.get("/ready").json()["status"]
        monkeypatch.setattr(ops, "STALLED_TIMES", 1e6)  # so long may a prompt take
        assert served.client.get("/health").status_code == 200
        monkeypatch.setattr(ops, "STALLED_TIMES", 0)
        with pytest.MonkeyPatch.context() as patch:
            idle = chat_llm.status()._replace(num_running=0, num_waiting=0)
            patch.setattr(chat_llm, "status", lambda: idle)  # as where requests wait for a replica
            assert served.client.get("/health").status_code == 200
        assert served.client.get("/health").status_code == 503
        is_stalled = False
        asked.result(20)
    assert served.client.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize("given", [0, 1, 5, 11, 12])
def test_a_stream_goes_on_where_it_broke_off(served: Served, given: int) -> None:
    """By its last frame's id or by the tokens themselves, the rest is equal to the bit."""
    body = chat_body("broken", stream=True, logprobs=True, return_token_ids=True, ignore_eos=True)
    whole = served.stream(CHAT, body)
    chunks = [f.data["choices"][0] for f in whole[1:-1]]
    ids = [i for c in chunks for i in c["token_ids"]]
    entries = [e for c in chunks for e in c["logprobs"]["content"]]
    text = "".join(c["delta"]["content"] for c in chunks)
    head_text = "".join(c["delta"]["content"] for f, c in zip(whole[1:-1], chunks, strict=True)
                        if int(f.event_id.partition(".")[2]) <= given)  # fmt: skip
    seen = [f.event_id for f in whole[1:-1] if int(f.event_id.partition(".")[2]) <= given]
    frame_id = seen[-1] if seen else "0.0"
    num_seen = int(frame_id.partition(".")[2])
    by_id = served.stream(CHAT, body, headers={"Last-Event-ID": frame_id})
    by_ids = served.stream(CHAT, {**body, "verispec": {"committed_ids": [ids[:num_seen]]}})
    for rest in (by_id, by_ids):
        found = [f.data["choices"][0] for f in rest[:-1] if "logprobs" in f.data["choices"][0]]
        assert [i for c in found for i in c.get("token_ids", [])] == ids[num_seen:]
        assert [e for c in found if c["logprobs"] for e in c["logprobs"]["content"]] == entries[num_seen:]
        assert head_text + "".join(c["delta"].get("content", "") for c in found) == text
    assert by_id[-2].event_id == whole[-2].event_id == by_ids[-2].event_id


@pytest.mark.parametrize(("path", "fields"), [
    (CHAT, {"messages": [{"role": "user", "content": "two"}], "logprobs": True}),
    ("/v1/completions", {"prompt": ["one", "two"], "logprobs": 1}),
])  # fmt: skip
def test_several_choices_go_on_where_each_of_them_was(served: Served, path: str, fields: dict[str, Any]) -> None:
    body = {**fields, "n": 2, "seed": 5, "max_tokens": 20, "ignore_eos": True, "stream": True, "return_token_ids": True}

    def told(found: list[Any]) -> dict[int, list[Any]]:
        """Text, ids and log-probabilities of each choice, joined."""
        joined: dict[int, list[Any]] = {}
        for choice in (f.data["choices"][0] for f in found if f.event_id):
            text, ids, logprobs = joined.setdefault(choice["index"], ["", [], []])
            entries = choice["logprobs"].get("content") or choice["logprobs"]["token_logprobs"]
            said = choice["delta"]["content"] if "delta" in choice else choice["text"]
            joined[choice["index"]] = [text + said, ids + choice["token_ids"], logprobs + entries]
        return joined

    whole = [f for f in served.stream(path, body) if f.event_id]
    middle = len(whole) // 2
    rest = served.stream(path, body, headers={"Last-Event-ID": whole[middle].event_id})
    assert told(whole[: middle + 1] + rest) == told(whole)
    assert len(told(whole)) == whole[0].event_id.count(",") + 1 > 1
    assert 0 < sum(len(ids) for _, ids, _ in told(rest).values()) < sum(len(ids) for _, ids, _ in told(whole).values())


def test_a_stop_inside_of_given_tokens_ends_it_at_once(served: Served) -> None:
    fields: dict[str, Any] = {"max_tokens": 20, "return_token_ids": True}
    ids = served.chat(**fields, ignore_eos=True)["choices"][0]["token_ids"]
    answer = served.chat(**fields, stop_token_ids=[ids[3]], verispec={"committed_ids": [ids[:6]]})
    (choice,) = answer["choices"]
    assert (choice["finish_reason"], choice["token_ids"], choice["message"]["content"]) == ("stop", [], "")
    assert answer["usage"]["completion_tokens"] == 6
    going_on = served.chat(**fields, ignore_eos=True, verispec={"committed_ids": [ids[:6]]})  # control
    assert going_on["choices"][0]["token_ids"] == ids[6:]


def test_a_stream_of_several_choices_may_break_off_twice(served: Served) -> None:
    """The ids of a continued stream know of choices that it has said nothing of yet."""
    body = chat_body("two", n=2, max_tokens=20, ignore_eos=True, stream=True, verispec={"speculative": False})
    whole = [f for f in served.stream(CHAT, body) if f.event_id]
    first = next(f for f in whole if "1.0" not in f.event_id and "0.0" not in f.event_id)
    seen = dict(part.split(".") for part in first.event_id.split(","))
    again = served.stream(CHAT, body, headers={"Last-Event-ID": first.event_id})
    for frame in (f for f in again if f.event_id):
        counts = dict(part.split(".") for part in frame.event_id.split(","))
        assert all(int(counts[choice]) >= int(seen[choice]) for choice in seen), (first.event_id, frame.event_id)
    assert again[-2].event_id == whole[-1].event_id


def test_going_on_needs_the_seed_and_a_real_id(served: Served) -> None:
    def status(event_id: str, **fields: Any) -> tuple[int, str | None]:
        """With the field that is wrong."""
        body = chat_body(**{"stream": True, **fields})
        answer = served.post(CHAT, body, headers={"Last-Event-ID": event_id})
        return answer.status_code, answer.json()["error"]["param"] if answer.status_code == 400 else None

    assert status("0.3") == (200, None)
    assert status("0.3", seed=None) == (400, "seed")
    assert status("0.3", stream=False) == (400, "stream")
    assert status("0.3", verispec={"deterministic": False}) == (400, "verispec.deterministic")
    for bad in ("", "3", "x.y", "5.1", "0.3,0.4,0.5"):
        assert status(bad) == (400, "Last-Event-ID"), bad


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/responses", {"input": "hello", "max_output_tokens": 40, "include": ["message.output_text.logprobs"]}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 40}),
])  # fmt: skip
def test_other_interfaces_go_on_where_they_were(served: Served, path: str, body: dict[str, Any]) -> None:
    body = {**body, "seed": 5, "stream": True, "verispec": {"speculative": False}}

    def told(found: list[Any]) -> tuple[str, list[Any]]:
        """Text and log-probabilities, joined."""
        deltas = [f.data for f in found if (f.name or "").endswith("delta") and isinstance(f.data.get("delta"), str)]
        blocks = [f.data["delta"]["text"] for f in found if f.name == "content_block_delta"]
        return "".join([d["delta"] for d in deltas] + blocks), [e for d in deltas for e in d["logprobs"]]

    whole = served.stream(path, body)
    places = [i for i, frame in enumerate(whole) if frame.event_id]
    middle = places[len(places) // 2]
    rest = served.stream(path, body, headers={"Last-Event-ID": whole[middle].event_id})
    assert told(whole[: middle + 1] + rest) == told(whole)
    assert "" != told(rest)[0] != told(whole)[0]
    assert rest[-1].name == whole[-1].name
