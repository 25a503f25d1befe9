"""A stream whose replica dies goes on at another one, to the bit as if nothing had happened. Needs no Ray."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop

from tests.support.chat_model import write_chat_model
from tests.support.fleet import Mortal, remote
from tests.support.served import frames
from tests.support.tiny_llm import loaded
from verispec.async_llm import AsyncLLM
from verispec.engine import Request
from verispec.errors import InputError
from verispec.llm import LLM
from verispec.ray.journal import Journal
from verispec.ray.replica import Replica
from verispec.receipt import parse, replay
from verispec.server.app import make_app
from verispec.server.core import Core
from verispec.server.settings import Settings
from verispec.text.detokenizer import TextStream
from verispec.types import SampleOutput, SamplingParams

MARK = 1  # a control token of the tiny model
PROMPT = tuple(b"the quick brown fox")
PARAMS: dict[str, Any] = {
    "n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 16, "repetition_penalty": 1.2, "frequency_penalty": 0.3,
    "presence_penalty": 0.1, "logprobs": 2, "stop": ["q", "zz"], "top_p": 0.95,
}  # fmt: skip


@pytest.fixture(scope="module")
def llms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[LLM]]:
    folder: Path = tmp_path_factory.mktemp("fleet")
    path = write_chat_model(folder / "tiny.gguf")
    with ExitStack() as stack:
        yield [stack.enter_context(loaded(path, folder, drafter=name, threads=1)) for name in ("suffix", "none")]


class Heard:
    """What a client hears of a request, put together from the events alone."""

    def __init__(self) -> None:
        self.ids: dict[int, list[int]] = {}
        self.values: dict[int, list[Any]] = {}
        self.texts: dict[int, str] = {}
        self.outputs: dict[int, SampleOutput] = {}

    async def listen(self, llm: LLM, params: dict[str, Any]) -> Heard:
        async for event in AsyncLLM(llm).stream(PROMPT, params):
            at = event.sample_index
            self.ids.setdefault(at, []).extend(event.token_ids)
            self.values.setdefault(at, []).extend(event.logprobs)
            self.texts[at] = self.texts.get(at, "") + event.text
            if event.output is not None:
                assert at not in self.outputs
                self.outputs[at] = event.output
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Heard) and vars(self) == vars(other)


def undisturbed(llm: LLM, **changes: Any) -> Heard:
    return asyncio.run(Heard().listen(llm, {**PARAMS, **changes}))


@pytest.mark.parametrize("life", [1, 2, 3, 5, 8, 13, 21])
def test_killed_anywhere_the_joined_answer_is_the_same(llms: list[LLM], life: int) -> None:
    async def heard() -> tuple[Heard, int]:
        async with remote(Mortal("a", llms[0], life=life), Mortal("b", llms[1])) as (llm, _):
            return await Heard().listen(llm, PARAMS), llm.thread.counts["failovers"]

    found, num_failovers = asyncio.run(heard())
    assert found == undisturbed(llms[1])
    assert num_failovers == 1


def test_what_follows_a_grammar_goes_on_in_it(llms: list[LLM]) -> None:
    pytest.importorskip("llguidance")
    params = {**PARAMS, "regex": "([a-f]{3}-){4}end", "max_tokens": 40, "stop": []}

    async def heard() -> Heard:
        async with remote(Mortal("a", llms[0], life=8), Mortal("b", llms[1])) as (llm, _):
            found = await Heard().listen(llm, params)
            assert llm.thread.counts["failovers"] == 1
            return found

    assert asyncio.run(heard()) == undisturbed(llms[1], **params)


def test_an_ingress_knows_what_drafters_can_do_at_the_replicas(llms: list[LLM]) -> None:
    async def texts() -> list[str]:
        async with remote(Mortal("a", llms[0])) as (llm, _):
            answers = AsyncLLM(llm)
            tree = {"method": "suffix", "tree": "branch:2,2"}
            found = await answers.generate("the quick", {"max_tokens": 6}, speculative=tree)
            with pytest.raises(InputError, match="needs a drafter of trees"):
                await answers.generate("the quick", {"max_tokens": 6}, speculative={**tree, "method": "none"})
            free = {"max_tokens": 6, "temperature": 1, "deterministic": False}
            with pytest.raises(InputError, match="needs the probabilities"):
                await answers.generate("the quick", free, speculative={"method": "suffix", "accept": "rejection"})
            return [completion.samples[0].text for completion in found]

    assert asyncio.run(texts()) == [llms[1].generate("the quick", {"max_tokens": 6})[0].samples[0].text]


def test_control_tokens_that_are_shown_are_shown_by_replicas(llms: list[LLM]) -> None:
    """Calls of tools are known by such tokens, in some families."""

    async def text() -> str:
        async with remote(Mortal("a", llms[0], life=3), Mortal("b", llms[1])) as (llm, _):
            params = SamplingParams(max_tokens=6, logit_bias=((MARK, 9000.0),), seed=1)
            shown = partial(TextStream, llm.tokenizer, shown_ids=[MARK])
            async with AsyncLLM(llm).open([Request(PROMPT, params, text=shown)]) as stream:
                return "".join([event.text async for event in stream])

    assert asyncio.run(text()) == "<|im_start|>" * 6


def test_one_answer_outlives_many_replicas(llms: list[LLM]) -> None:
    async def heard() -> tuple[Heard, int]:
        replicas = [Mortal(f"r{i}", llms[i % 2], life=2) for i in range(6)]
        async with remote(*replicas, Mortal("last", llms[0])) as (llm, _):
            return await Heard().listen(llm, PARAMS), llm.thread.counts["failovers"]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as under Ray
        found, num_failovers = runner.run(heard())
    assert found == undisturbed(llms[0])
    assert num_failovers >= 4


def test_control_without_its_journal_the_answer_is_another(llms: list[LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Journal, "rest", lambda self: self.request)  # committed tokens are forgotten

    async def heard() -> Heard:
        async with remote(Mortal("a", llms[0], life=5), Mortal("b", llms[1])) as (llm, _):
            return await Heard().listen(llm, PARAMS)

    assert asyncio.run(heard()) != undisturbed(llms[1])


def test_what_a_stopped_replica_says_later_is_not_heard(llms: list[LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that is silent for too long is given up; when it wakes, the answer is somebody else's by then."""

    monkeypatch.setattr("verispec.ray.remote.LAST_FRAME_SECONDS", 1.5)

    async def heard() -> tuple[Heard, int]:
        async with remote(Mortal("a", llms[0], mute=4.0), Mortal("b", llms[1]), silence=2.0) as (llm, fleet):
            found = await Heard().listen(llm, PARAMS)
            await asyncio.sleep(4.0)  # it wakes
            return found, len(fleet.works)

    assert asyncio.run(heard()) == (undisturbed(llms[1]), 2)


def test_a_replica_with_another_profile_is_refused(llms: list[LLM], caplog: pytest.LogCaptureFixture) -> None:
    class Other(Replica):
        fingerprint = "vs-other"  # type: ignore[assignment]

    async def heard() -> tuple[Heard, Any, list[str]]:
        async with remote(Mortal("good", llms[0], life=3), Other("odd", llms[1]), Mortal("late", llms[1])) as (
            llm,
            fleet,
        ):
            found = await Heard().listen(llm, PARAMS)
            await Heard().listen(llm, PARAMS)
            return found, llm.thread.counts, [",".join(sorted(w.refused)) for w in fleet.works]

    found, counts, refused = asyncio.run(heard())
    assert found == undisturbed(llms[0])
    assert counts["replicas_refused"] == 1
    assert refused == ["", "", "odd", "odd"]
    assert "odd is not asked any more: its fingerprint is vs-other" in caplog.text


def test_another_library_for_constraints_is_another_profile(llms: list[LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """It may allow other tokens behind those that the first replica gave."""
    first = Replica("a", llms[0]).fingerprint
    assert Replica("b", llms[1]).fingerprint == first
    monkeypatch.setattr("verispec.constraints.compiler.version", lambda name: "0.0")
    assert Replica("b", llms[1]).fingerprint != first


@pytest.mark.parametrize("is_broken", [False, True])
def test_two_replicas_are_compared(llms: list[LLM], is_broken: bool, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Replica):
        """Its arithmetic is off: every answer is that of the next seed."""

        async def _request(self, work: Any) -> Any:
            request = await super()._request(work)
            return replace(request, params=replace(request.params, seed=request.params.seed + is_broken))

    async def counted() -> Any:
        async with remote(Replica("a", llms[0]), Broken("b", llms[1]), cross_check=1.0) as (llm, _):
            await Heard().listen(llm, PARAMS)
            async with asyncio.timeout(20):
                while not llm.thread.counts["cross_checks"]:
                    await asyncio.sleep(0.01)
            core = Core(llm, Settings())
            core.metrics.add(llm.thread)
            return core.metrics.text().decode()

    text = asyncio.run(counted())
    assert "verispec:cross_checks_total 1.0" in text
    assert f"verispec:cross_check_mismatches_total {float(is_broken)}" in text
    assert ("computes wrongly" in caplog.text) is is_broken


@pytest.mark.parametrize("has_begun", [True, False])
def test_aborted_requests_leave_nothing_behind(llms: list[LLM], has_begun: bool) -> None:
    class Deaf(Replica):
        """What is cancelled goes on, as a task does that Ray no longer reaches."""

        async def run(self, work: Any) -> Any:
            return await asyncio.shield(super().run(work))

    async def run() -> None:
        async with remote(Deaf("a", llms[0])) as (llm, fleet):
            stream = AsyncLLM(llm).stream(PROMPT, {**PARAMS, "max_tokens": 900, "stop": [], "ignore_eos": True})
            if has_begun:
                await stream.take()
            else:
                while not fleet.works:
                    await asyncio.sleep(0)
            stream.close()
            await asyncio.sleep(0.05)
            for _ in range(200):
                if not fleet.replicas[0]._streams and not llm.thread._tasks:
                    break
                await asyncio.sleep(0.01)
            assert not fleet.replicas[0]._streams
            assert not llm.thread._tasks

    asyncio.run(run())


CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
SAID = {"messages": [{"role": "user", "content": "hello"}]}
SCHEMA = {"type": "object", "properties": {"on": {"type": "boolean"}, "how": {"enum": ["fast", "slow"]}},
          "required": ["on", "how"], "additionalProperties": False}  # fmt: skip
FUNCTION = {"name": "look", "parameters": SCHEMA}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {**SAID, "n": 2, "logprobs": True, "top_logprobs": 2, "stream_options": {"include_usage": True}}),
    "completions": ("/v1/completions", {"prompt": "hello", "logprobs": 2, "stop": "zq"}),
    "responses": (RESPONSES, {"input": "hello"}),
    "messages": (MESSAGES, SAID),
}
SHAPED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat by a schema": (CHAT, {**SAID, "n": 2, "response_format": {"type": "json_schema", "json_schema": {
        "name": "it", "schema": SCHEMA}}}),
    "chat with calls": (CHAT, {**SAID, "tools": [{"type": "function", "function": FUNCTION}],
                               "tool_choice": "required"}),
    "responses with calls": (RESPONSES, {"input": "hello", "tools": [{"type": "function", **FUNCTION}],
                                         "tool_choice": "required"}),
    "messages with calls": (MESSAGES, {**SAID, "tools": [{"name": "look", "input_schema": SCHEMA}],
                                       "tool_choice": {"type": "any"}}),
}  # fmt: skip
PIECES = ("content", "text", "delta", "arguments", "partial_json")
UNEQUAL = {"id", "item_id", "created", "created_at", "metrics", "tokens_per_pass", "no_draft_reason",
           "completion_tokens_details", "output"}  # fmt: skip


def over_http(llms: list[LLM], way: tuple[str, dict[str, Any]], *, life: int | None) -> tuple[dict[str, Any], int]:
    """What is told of a request whose replica dies after so many tokens, and how often it went on elsewhere."""
    path, fields = way
    limit = {RESPONSES: "max_output_tokens"}.get(path, "max_tokens")
    body = {limit: 24 if way in WAYS.values() else 120, "seed": 3, "stream": True, **fields}

    async def told() -> tuple[dict[str, Any], int]:
        async with remote(Mortal("a", llms[0], life=life), Mortal("b", llms[1])) as (llm, _):
            transport = httpx.ASGITransport(make_app(Core(llm, Settings())))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                answer = await client.post(path, json=body)
            assert answer.status_code == 200
            return joined(answer.text), llm.thread.counts["failovers"]

    return asyncio.run(told())


@pytest.mark.parametrize("way", WAYS)
def test_over_http_nobody_notices(llms: list[LLM], way: str) -> None:
    whole, none = over_http(llms, WAYS[way], life=None)
    broken, one = over_http(llms, WAYS[way], life=6)
    assert (none, one) == (0, 1)
    assert broken == whole


@pytest.mark.parametrize("way", SHAPED)
def test_over_http_answers_go_on_in_their_shape(llms: list[LLM], way: str) -> None:
    """Lost before, in and behind the head of a call, in a key, in a word."""
    whole, none = over_http(llms, SHAPED[way], life=None)
    assert any("fast" in str(value) or "slow" in str(value) for value in whole.values())
    for life in (1, 6, 13, 20, 27):
        broken, one = over_http(llms, SHAPED[way], life=life)
        assert (none, one) == (0, 1)
        assert broken == whole, life


def test_a_replica_compiles_beside_its_loop(llms: list[LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()
    grammar = LLM.grammar

    def noted(llm: LLM, params: SamplingParams) -> Any:
        if llm is llms[0]:
            threads.add(threading.current_thread())
        return grammar(llm, params)

    monkeypatch.setattr(LLM, "grammar", noted)

    async def heard() -> None:
        async with remote(Replica("a", llms[0])) as (llm, _):
            await Heard().listen(llm, {**PARAMS, "regex": "[ab]{3}", "stop": []})

    asyncio.run(heard())
    assert threads
    assert threading.current_thread() not in threads


def test_the_receipt_of_a_joined_answer_is_true(llms: list[LLM]) -> None:
    body = {
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 24,
        "seed": 3,
        "verispec": {"receipt": True},
    }

    async def audited() -> tuple[Any, Any, Any]:
        async with remote(Mortal("a", llms[0], life=6), Mortal("b", llms[1])) as (llm, _):
            transport = httpx.ASGITransport(make_app(Core(llm, Settings())))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                answer = (await client.post("/v1/chat/completions", json=body)).json()
                assert llm.thread.counts["failovers"] == 1
                named = {"id": answer["verispec"]["receipt"]}
                receipt = await client.get(f"/verispec/receipts/{named['id']}")
                replayed = await client.post("/verispec/replay", json=named)
                checked = await client.post("/verispec/check", json=named)
                return receipt.text, replayed.json(), checked.json()

    receipt, replayed, checked = asyncio.run(audited())
    assert replayed["reproduced"], replayed
    assert checked["equal"], checked
    assert replay(llms[1], parse(receipt)).reproduced


def joined(text: str) -> dict[str, Any]:
    """What the frames say, whichever way the tokens were grouped into them: by place, texts and lists put together."""
    found: dict[str, Any] = {}

    def add(place: str, value: Any) -> None:
        if isinstance(value, dict):
            index = value.get("index", "")
            for key, each in value.items():
                if key not in UNEQUAL and key not in ("sequence_number", "index", "text_offset"):
                    add(f"{place}.{key}{index if key in ('delta', 'logprobs', 'finish_reason', 'text') else ''}", each)
        elif isinstance(value, list):
            if value and isinstance(value[0], dict) and "index" in value[0]:
                for each in value:
                    add(f"{place}[{each['index']}]", each)
            else:
                found[place] = found.get(place, []) + value
        elif isinstance(value, str) and place.rpartition(".")[2].startswith(PIECES):
            found[place] = found.get(place, "") + value
        elif value is not None:
            found[place] = value

    for frame in frames(iter(text.splitlines())):
        if frame.data is not None:
            assert "error" not in frame.data or frame.data["error"] is None, frame.data
            add(frame.name or "", frame.data)
    return found


def test_ray_is_never_imported_without_being_asked_for() -> None:
    code = "import sys, verispec, verispec.ray, verispec.cli.main, verispec.ray.remote; print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
