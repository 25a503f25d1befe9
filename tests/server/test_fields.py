"""Every field of every interface is honoured, inert or refused, and behaves as its class says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.golden_tokenizers import small_metadata
from tests.support.served import Frame, Served, chat_body, serving
from tests.support.tiny_llm import loaded
from tests.support.tiny_models import TinyConfig, write_gguf
from verispec.llm import LLM
from verispec.server import api
from verispec.server.app import ROUTES
from verispec.types import SamplingParams

USER = {"role": "user", "content": "hello"}
# A request to each route that answers with something that depends on its fields.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat_body(),
    "/v1/completions": {"prompt": "abc", "seed": 7},
    "/v1/responses": {"input": "hello", "max_output_tokens": 6, "seed": 7},
    "/v1/messages": {"messages": [USER], "max_tokens": 6, "seed": 7},
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/generate": {"text": "abc", "sampling_params": {"seed": 7, "max_tokens": 6}},
    "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": {"seed": 7, "max_tokens": 6}},
}
KINDS: dict[str, Any] = {route.path: route.body for route in ROUTES if route.body is not None}
NESTED: dict[str, Any] = {"/generate": api.GenerateSampling, "/inference/v1/generate": api.TokensSampling}


def with_field(path: str, name: str, value: Any) -> dict[str, Any]:
    """A body with one field more, which may be one of `sampling_params`."""
    outer, _, inner = name.partition(".")
    return {**BODIES[path], outer: {**BODIES[path].get(outer, {}), inner: value} if inner else value}


def fields_of(class_: str) -> list[tuple[str, str]]:
    found = [(path, name) for path, kind in KINDS.items() for name in sorted(getattr(kind, class_))]
    return found + [
        (p, f"sampling_params.{name}") for p, kind in NESTED.items() for name in sorted(getattr(kind, class_))
    ]


def told(answer: dict[str, Any]) -> Any:
    """What a field that is inert must not change."""
    own = answer.get("verispec") or answer.get("meta_info", {}).get("verispec") or {}
    return own.get("digest"), answer.get("input_tokens"), answer.get("choices"), answer.get("output_ids")


@pytest.mark.parametrize("kind", [*KINDS.values(), *NESTED.values()], ids=lambda kind: kind.__name__)
def test_every_field_is_of_one_class(kind: Any) -> None:
    classes = (kind.honoured, kind.inert, kind.refused)
    assert frozenset().union(*classes) == set(kind.__struct_fields__)
    assert sum(map(len, classes)) == len(kind.__struct_fields__)


@pytest.mark.parametrize(("path", "name"), fields_of("inert"))
def test_inert_fields_change_nothing(served: Served, path: str, name: str) -> None:
    plain = served.post(path, BODIES[path]).json()
    answer = served.post(path, with_field(path, name, {"x": 1}))
    assert answer.status_code == 200, answer.text
    assert told(answer.json()) == told(plain)
    assert any(told(plain))  # control


@pytest.mark.parametrize(("path", "name"), fields_of("refused"))
def test_refused_fields_are_refused_unless_null(served: Served, path: str, name: str) -> None:
    answer = served.post(path, with_field(path, name, 1))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], name in error["message"]) == (name, True)
    assert served.post(path, with_field(path, name, None)).status_code == 200


def test_including_log_probabilities_gives_them(served: Served) -> None:
    def entries(**fields: Any) -> list[Any]:
        answer = served.post("/v1/responses", {**BODIES["/v1/responses"], **fields}).json()
        found: list[Any] = answer["output"][0]["content"][0]["logprobs"]
        return found

    assert len(entries(include=["message.output_text.logprobs"])) == 6
    assert entries(include=["reasoning.encrypted_content"]) == entries() == []


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_a_context_is_managed_only_where_nothing_changes(served: Served, path: str) -> None:
    def answer(*kinds: str) -> Any:
        edits = [{"type": kind, "keep": "all"} for kind in kinds]
        return served.post(path, with_field(path, "context_management", {"edits": edits}))

    assert answer("clear_thinking_20251015").status_code == answer().status_code == 200
    refused = answer("clear_thinking_20251015", "clear_tool_uses_20250919")
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "context_management.edits[1].type"


def test_fields_beyond_openais_are_honoured(served: Served) -> None:
    def ids(**fields: Any) -> list[int]:
        found: list[int] = served.chat(return_token_ids=True, **fields)["choices"][0]["token_ids"]
        return found

    plain = ids(max_tokens=20, ignore_eos=True)
    assert len(plain) == 20
    stop = plain[5]
    assert ids(max_tokens=20, stop_token_ids=[stop]) == plain[: plain.index(stop) + 1]
    assert len(ids(max_tokens=20, min_tokens=20, stop_token_ids=[stop])) == 20
    assert ids(max_tokens=20, min_p=1.0, ignore_eos=True) == ids(max_tokens=20, temperature=0, ignore_eos=True) != plain
    repeated = {"logit_bias": {"68": 30}, "temperature": 0, "max_tokens": 8}
    assert len(set(ids(**repeated))) == 1
    assert len(set(ids(**repeated, repetition_penalty=100))) > 1


def test_responses_draw_as_chat_completions_do(served: Served) -> None:
    """guidellm, for one, sends `ignore_eos` to every interface."""
    for fields in (
        {"ignore_eos": True}, {"ignore_eos": True, "stop": None}, {"min_tokens": 20, "stop": ["e", "x"]},
        {"top_k": 2}, {"min_p": 0.5}, {"logit_bias": {"68": 5}, "repetition_penalty": 3}, {"presence_penalty": 9},
        {"frequency_penalty": 9, "logit_bias": {"70": 5}}, {"stop_token_ids": list(range(3, 60))},
        {"stop": ["e", "a", "i"], "include_stop_str_in_output": True},
    ):  # fmt: skip
        chat = served.chat(max_tokens=20, **fields)
        answer = served.post("/v1/responses", {"input": "hello", "max_output_tokens": 20, "seed": 7, **fields}).json()
        assert answer["verispec"]["digest"] == chat["verispec"]["digest"], fields
        assert answer["output"][0]["content"][0]["text"] == chat["choices"][0]["message"]["content"], fields


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_usage_with_every_frame(served: Served, path: str) -> None:
    body = {**BODIES[path], "stream": True, "max_tokens": 9, "ignore_eos": True, "return_token_ids": True}
    for options in ({"include_usage": True, "continuous_usage_stats": True}, {"continuous_usage_stats": True}):
        frames = served.stream(path, {**body, "stream_options": options})[:-1]
        counts = [f.data["usage"]["completion_tokens"] for f in frames]
        told = [int((f.event_id or "0.0").partition(".")[2]) for f in frames]
        assert counts == [*told[:-1], 9]  # what the client has by then, the first frame included
        assert bool(frames[-1].data["choices"]) != bool(options.get("include_usage"))
    for frame in (f.data for f in served.stream(path, body) if f.event_id):
        assert "usage" not in frame  # control


def joined(frames: list[Frame]) -> dict[int, dict[str, list[Any]]]:
    """The log-probabilities of frames, by choice, put together as a whole answer has them."""
    found: dict[int, dict[str, list[Any]]] = {}
    for choice in (f.data["choices"][0] for f in frames if f.event_id):
        for name, values in choice["logprobs"].items():
            found.setdefault(choice["index"], {}).setdefault(name, []).extend(values)
    return found


@pytest.mark.parametrize("given", [0, 4])
def test_log_probabilities_of_frames_are_those_of_the_whole(served: Served, given: int) -> None:
    """Offsets too, which count from the beginning of the answer, however it comes to the client."""
    path = "/v1/completions"
    ask: dict[str, Any] = {"prompt": ["abc", "Grüße"], "n": 2, "seed": 5, "logprobs": 2,
                           "ignore_eos": True, "return_token_ids": True}  # fmt: skip
    committed_ids = [[70, 71, 200, 73], [80, 81, 82, 83]] if given else None
    ask |= {"max_tokens": 80, "verispec": {"speculative": False, "committed_ids": committed_ids}}
    whole = {c["index"]: c["logprobs"] for c in served.post(path, ask).json()["choices"]}
    frames = [f for f in served.stream(path, {**ask, "stream": True}) if f.event_id]
    assert joined(frames) == whole
    assert len(frames) > len(whole)  # control: it came in pieces
    middle = len(frames) // 2
    rest = served.stream(path, {**ask, "stream": True}, headers={"Last-Event-ID": frames[middle].event_id})
    assert joined(frames[: middle + 1] + rest) == whole
    assert joined(rest) != whole


def test_offsets_behind_given_tokens_are_those_of_the_unbroken_answer(served: Served) -> None:
    path = "/v1/completions"
    ask: dict[str, Any] = {"prompt": "abc", "seed": 5, "max_tokens": 24, "logprobs": 0, "ignore_eos": True,
                           "return_token_ids": True}  # fmt: skip
    choice = served.post(path, ask).json()["choices"][0]
    ask["verispec"] = {"committed_ids": [choice["token_ids"][:9]]}
    found = served.post(path, ask).json()["choices"][0]["logprobs"]
    assert found == {name: values[9:] for name, values in choice["logprobs"].items()}
    assert joined(served.stream(path, {**ask, "stream": True}))[0] == found


def test_offsets_count_the_characters_of_the_text(served: Served, chat_llm: LLM) -> None:
    """Also where a character is several tokens, all of which begin where it does."""
    text = "Grüße, 世界"
    ids = chat_llm.tokenizer.encode(text)
    choice = served.post("/v1/completions", {"prompt": [ids], "echo": True, "logprobs": 0, "max_tokens": 1}).json()
    logprobs = choice["choices"][0]["logprobs"]
    starts = [len(chat_llm.tokenizer.decode(ids[:i]).rstrip("\ufffd")) for i in range(len(ids) + 1)]
    assert logprobs["text_offset"] == starts
    assert starts[-1] == len(text) < len(ids)  # control: bytes would be counted otherwise


def test_a_completion_goes_on_with_the_text_of_its_prompt(tmp_path: Path) -> None:
    """SentencePiece marks words by a space in front; only that of a whole text is none of its own."""
    metadata = small_metadata("sentencepiece")
    config = TinyConfig(vocab_size=len(metadata["tokenizer.ggml.tokens"]))
    write_gguf(tmp_path / "words.gguf", config, metadata=metadata)
    with loaded(tmp_path / "words.gguf", tmp_path) as llm, serving(llm) as server:
        tokenizer, num_spaces = llm.tokenizer, 0
        likely = {str(i): 9 for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i).startswith(b" ")}
        sampling: dict[str, Any] = {"max_tokens": 6, "temperature": 1, "ignore_eos": True, "logit_bias": likely}
        assert tokenizer.strips_leading_space
        for seed in range(8):
            ask = {"prompt": "the cat", **sampling, "seed": seed, "logprobs": 0, "return_token_ids": True}
            choice = server.post("/v1/completions", ask).json()["choices"][0]
            echoed = server.post("/v1/completions", {**ask, "echo": True}).json()["choices"][0]
            prompt_ids, ids = choice["prompt_token_ids"], choice["token_ids"]
            assert "the cat" + choice["text"] == echoed["text"] == tokenizer.decode([*prompt_ids, *ids])
            assert echoed["logprobs"]["text_offset"][-6:] == [7 + start for start in choice["logprobs"]["text_offset"]]
            num_spaces += choice["text"].startswith(" ")
            bias = {int(token_id): value for token_id, value in likely.items()}
            (completion,) = llm.generate("the cat", SamplingParams(**{**sampling, "logit_bias": bias, "seed": seed}))
            assert completion.samples[0].text == choice["text"]
        assert num_spaces, "control: some answer begins with a space"


def test_the_chosen_token_is_among_the_likeliest_of_completions(served: Served, chat_llm: LLM) -> None:
    """As OpenAI has it; of two tokens with the same text the likelier one counts."""
    for count in (0, 2):
        ask = {"prompt": "abc", "max_tokens": 8, "seed": 3, "logprobs": count, "echo": True}
        found = served.post("/v1/completions", ask).json()["choices"][0]["logprobs"]
        assert found["top_logprobs"][0] is found["token_logprobs"][0] is None
        columns = (found[name][1:] for name in ("tokens", "token_logprobs", "top_logprobs"))
        for text, own, tops in zip(*columns, strict=True):
            assert tops[text] == own
            assert count <= len(tops) <= count + 1


def test_log_probabilities_are_the_shortest_that_read_back(served: Served, chat_llm: LLM) -> None:
    entries = served.chat(logprobs=True, top_logprobs=3, max_tokens=20)["choices"][0]["logprobs"]["content"]
    values = [each["logprob"] for entry in entries for each in (entry, *entry["top_logprobs"])]
    assert [repr(value) for value in values] == [str(np.float32(value)) for value in values]
    assert any(value != float(np.float32(value)) for value in values)  # control: not the float32 itself, as a double


@pytest.mark.parametrize("fields", [{"echo": True}, {"prompt_logprobs": 1}])
def test_what_a_stream_cannot_have_is_refused(served: Served, fields: dict[str, Any]) -> None:
    answer = served.post("/v1/completions", {"prompt": "abc", "stream": True, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, *fields)
    assert served.post("/v1/completions", {"prompt": "abc", **fields}).status_code == 200
