"""Answers in a shape over HTTP: they match, and are the same in every interface, streamed, resumed and in a crowd."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.server.test_tools import CHAT, LOOK, MESSAGES, RESPONSES, SAY, SCHEMA, ids_of, joined_calls
from tests.support.chat_model import write_chat_model
from tests.support.hostile_shapes import chained_rules, patterns
from tests.support.served import Frame, Served, chat_body, serving
from tests.support.tiny_llm import loaded

COMPLETIONS = "/v1/completions"
ASK: dict[str, Any] = {"max_tokens": 200, "temperature": 1.0, "seed": 3}
FORMAT = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}
USER = {"role": "user", "content": "hello"}


def flat(tool: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A tool as responses have it."""
    return {"type": "function", **tool["function"], **more}


def theirs(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as messages have it."""
    known = {key: value for key, value in tool["function"].items() if key != "parameters"}
    return {**known, "input_schema": tool["function"]["parameters"]}


def asked(path: str, **fields: Any) -> dict[str, Any]:
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    said = {"input": "hello"} if path == RESPONSES else {"messages": [USER]}
    return {**said, "temperature": 1.0, "seed": 3, limit: 200, **fields}


def test_an_answer_matches_its_schema_in_every_interface(served: Served) -> None:
    chat = served.chat(**ASK, response_format=FORMAT)
    text = chat["choices"][0]["message"]["content"]
    jsonschema.validate(json.loads(text), SCHEMA)
    assert chat["choices"][0]["finish_reason"] == "stop"
    by_vllm = served.chat(**ASK, structured_outputs={"json": json.dumps(SCHEMA)})
    assert by_vllm["verispec"]["digest"] == chat["verispec"]["digest"]
    inner = {"type": "json_schema", "name": "it", "schema": SCHEMA, "strict": True}
    response = served.post(RESPONSES, asked(RESPONSES, text={"format": inner})).json()
    assert response["output"][0]["content"][0]["text"] == text
    assert response["text"]["format"]["schema"] == SCHEMA
    own = {"format": {"type": "json_schema", "schema": SCHEMA}}
    message = served.post(MESSAGES, asked(MESSAGES, output_config=own)).json()
    assert message["content"][0]["text"] == text
    assert message["verispec"]["digest"] == response["verispec"]["digest"] == chat["verispec"]["digest"]


@pytest.mark.parametrize(("wanted", "pattern"), [
    ({"regex": "[ab]{3}c"}, "[ab]{3}c"),
    ({"choice": ["yes", 'no "way"\n']}, 'yes|no "way"\n'),
    ({"grammar": 'start: "x" NUMBER\nNUMBER: /[0-9]{2}/'}, "x[0-9]{2}"),
    ({"json_object": True}, r"(?s)\{.*"),
])  # fmt: skip
def test_vllms_words_for_it(served: Served, wanted: dict[str, Any], pattern: str) -> None:
    body = {"prompt": "ab", **ASK, "max_tokens": 40, "structured_outputs": wanted}
    (choice,) = served.post(COMPLETIONS, body).json()["choices"]
    assert re.fullmatch(pattern, choice["text"]), choice
    ids = ids_of(served, "ab")
    sampling = {**ASK, "max_tokens": 40, "structured_outputs": wanted}
    tokens = served.post("/inference/v1/generate", {"token_ids": ids, "sampling_params": sampling}).json()
    assert served.post("/detokenize", {"tokens": tokens["choices"][0]["token_ids"]}).json()["prompt"] == choice["text"]


def test_any_object_is_an_object(served: Served) -> None:
    for seed in range(2):
        answer = served.chat(**{**ASK, "seed": seed, "max_tokens": 60}, response_format={"type": "json_object"})[
            "choices"
        ][0]
        assert answer["message"]["content"].startswith("{")
        if answer["finish_reason"] == "stop":
            assert isinstance(json.loads(answer["message"]["content"]), dict)


CHOICES: list[Any] = ["required", {"type": "function", "function": {"name": "say"}}]


@pytest.mark.parametrize("choice", CHOICES, ids=["required", "named"])
def test_calls_that_must_be_made_are_right_in_every_interface(served: Served, choice: Any) -> None:
    tools = {"tools": [LOOK, SAY], "tool_choice": choice, "parallel_tool_calls": False}
    chat = served.chat(**ASK, **tools)
    (call,) = chat["choices"][0]["message"]["tool_calls"]
    jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
    assert chat["choices"][0]["finish_reason"] == "tool_calls"
    if choice != "required":
        assert call["function"]["name"] == "say"
    frames = served.stream(CHAT, chat_body(**ASK, **tools, stream=True))
    assert joined_calls(frames) == [call]
    own = {"type": "function", "name": "say"} if choice != "required" else choice
    fields = asked(RESPONSES, tools=[flat(LOOK), flat(SAY)], tool_choice=own, parallel_tool_calls=False)
    (item,) = served.post(RESPONSES, fields).json()["output"]
    assert (item["name"], item["arguments"]) == (call["function"]["name"], call["function"]["arguments"])
    assert item["call_id"] == call["id"]
    events = served.stream(RESPONSES, {**fields, "stream": True})
    deltas = [e.data["delta"] for e in events if e.name == "response.function_call_arguments.delta"]
    assert "".join(deltas) == item["arguments"]
    assert events[-1].data["response"]["output"] == [item]
    wanted = {"type": "any" if choice == "required" else "tool", "disable_parallel_tool_use": True}
    if choice != "required":
        wanted["name"] = "say"
    said = asked(MESSAGES, tools=[theirs(LOOK), theirs(SAY)], tool_choice=wanted)
    message = served.post(MESSAGES, said).json()
    (block,) = message["content"]
    assert (block["name"], block["input"]) == (item["name"], json.loads(item["arguments"]))
    assert message["stop_reason"] == "tool_use"
    parts = [
        e.data["delta"] for e in served.stream(MESSAGES, {**said, "stream": True}) if e.name == "content_block_delta"
    ]
    assert "".join(part["partial_json"] for part in parts) == item["arguments"]


CUT = 55  # tokens: in the middle of the arguments


def test_a_call_that_is_cut_short_says_so_in_every_interface(served: Served) -> None:
    fields = {**ASK, "max_tokens": CUT, "tools": [LOOK, SAY], "tool_choice": "required"}
    (choice,) = served.chat(**fields)["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "length"
    cut = call["function"]["arguments"]
    assert cut.startswith('{"on": ')
    with pytest.raises(json.JSONDecodeError):
        json.loads(cut)
    frames = served.stream(CHAT, chat_body(**fields, stream=True))
    assert joined_calls(frames) == [call]
    assert [f.data["choices"][0]["finish_reason"] for f in frames[:-1]][-1] == "length"
    tools = {"tools": [flat(LOOK), flat(SAY)], "tool_choice": "required", "max_output_tokens": CUT}
    response = served.post(RESPONSES, asked(RESPONSES, **tools)).json()
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    (item,) = response["output"]
    assert (item["status"], item["arguments"], item["call_id"]) == ("incomplete", cut, call["id"])
    *_, last = served.stream(RESPONSES, asked(RESPONSES, **tools, stream=True))
    assert (last.name, last.data["response"]["output"]) == ("response.incomplete", [item])
    own = {"tools": [theirs(LOOK), theirs(SAY)], "tool_choice": {"type": "any"}, "max_tokens": CUT}
    message = served.post(MESSAGES, asked(MESSAGES, **own)).json()
    assert (message["stop_reason"], [block["id"] for block in message["content"]]) == ("max_tokens", [call["id"]])
    events = served.stream(MESSAGES, asked(MESSAGES, **own, stream=True))
    parts = [e.data["delta"] for e in events if e.name in ("content_block_delta", "message_delta")]
    assert "".join(part.get("partial_json", "") for part in parts) == cut
    assert parts[-1]["stop_reason"] == "max_tokens"


def test_only_allowed_tools_are_called(served: Served) -> None:
    def called(name: str) -> set[str]:
        allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": name}}]}
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        found = [served.chat(**{**ASK, "seed": i}, tools=[LOOK, SAY], tool_choice=choice) for i in range(4)]
        return {call["function"]["name"] for each in found for call in each["choices"][0]["message"]["tool_calls"]}

    assert called("say") == {"say"}
    assert called("look") == {"look"}
    tools = {"tools": [flat(LOOK), flat(SAY)]}
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "say"}]}
    response = served.post(RESPONSES, asked(RESPONSES, **tools, tool_choice=choice)).json()
    assert {item["name"] for item in response["output"]} == {"say"}
    unknown = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "sing"}]}
    assert served.post(RESPONSES, asked(RESPONSES, **tools, tool_choice=unknown)).status_code == 400


def test_where_no_tool_may_be_called_none_is_shown(served: Served) -> None:
    own = {"tools": [flat(LOOK)], "tool_choice": "none", "max_output_tokens": 12}
    response = served.post(RESPONSES, asked(RESPONSES, **own)).json()
    plain = served.post(RESPONSES, asked(RESPONSES, max_output_tokens=12)).json()
    assert response["output"][0]["content"] == plain["output"][0]["content"]
    assert response["usage"]["input_tokens"] == plain["usage"]["input_tokens"]
    shown = served.post(RESPONSES, asked(RESPONSES, **{**own, "tool_choice": "auto"})).json()
    assert shown["usage"]["input_tokens"] > plain["usage"]["input_tokens"]  # control
    said = {"tools": [theirs(LOOK)], "tool_choice": {"type": "none"}, "max_tokens": 12}
    message = served.post(MESSAGES, asked(MESSAGES, **said)).json()
    assert message["content"] == served.post(MESSAGES, asked(MESSAGES, max_tokens=12)).json()["content"]


def strict(tool: dict[str, Any]) -> dict[str, Any]:
    return {**tool, "function": {**tool["function"], "strict": True}}


def parallel(served: Served) -> dict[str, Any]:
    """A request whose answer is two calls or more, and whose client has seen the first tag."""
    given = {"committed_ids": [ids_of(served, "So.\n<tool_call>")]}
    bias = {str(ids_of(served, "\n")[0]): 30}  # no end where there may be another call
    return chat_body(**{**ASK, "max_tokens": 300}, tools=[strict(LOOK), SAY], logit_bias=bias, verispec=given)


def test_arguments_of_strict_tools_stream_in_pieces(served: Served) -> None:
    body = parallel(served)
    whole = served.post(CHAT, body).json()["choices"][0]["message"]["tool_calls"]
    assert len(whole) > 1
    frames = served.stream(CHAT, {**body, "stream": True})
    assert joined_calls(frames) == whole
    pieces = [d for f in frames[:-1] for d in f.data["choices"][0]["delta"].get("tool_calls", ())]
    assert len(pieces) > len(whole) + 1
    assert len({call["id"] for call in whole}) == len(whole)
    for call in whole[:-1]:
        if call["function"]["name"] == "look":  # the other is not strict
            jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)


def test_a_stream_of_calls_continues_behind_any_frame(served: Served) -> None:
    fields = {**ASK, "tools": [LOOK, SAY], "tool_choice": "required", "stream": True, "max_tokens": 150}
    frames = served.stream(CHAT, chat_body(**fields))
    named = [i for i, frame in enumerate(frames) if frame.event_id]

    def deltas(found: list[Frame]) -> list[Any]:
        return [d for f in found[:-1] for d in f.data["choices"][0]["delta"].get("tool_calls", ())]

    def told(entries: list[Any]) -> list[tuple[int, str]]:
        return [(e["index"], e["function"].get("name", "") + e["function"]["arguments"]) for e in entries]

    def joined(entries: list[tuple[int, str]]) -> dict[int, str]:
        found: dict[int, str] = {}
        for index, text in entries:
            found[index] = found.get(index, "") + text
        return found

    for i in named[:: max(1, len(named) // 6)]:
        rest = served.stream(CHAT, chat_body(**fields), headers={"Last-Event-ID": frames[i].event_id or ""})
        both = told(deltas([*frames[: i + 1], frames[-1]])) + told(deltas(rest))
        assert joined(both) == joined(told(deltas(frames))), frames[i].event_id


def test_what_a_schema_ended_was_no_stop_sequence(served: Served) -> None:
    fields = {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}, "stop_sequences": ["zzz"]}
    message = served.post(MESSAGES, asked(MESSAGES, **fields)).json()
    jsonschema.validate(json.loads(message["content"][0]["text"]), SCHEMA)
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)


def test_a_stop_sequence_that_the_client_has_the_beginning_of_is_named(served: Served) -> None:
    chat = served.post(CHAT, chat_body(**ASK, return_token_ids=True, ignore_eos=True)).json()["choices"][0]
    text, token_ids = chat["message"]["content"], chat["token_ids"]
    stop = text[1:6]
    given = {"committed_ids": [token_ids[:3]]}
    message = served.post(MESSAGES, asked(MESSAGES, stop_sequences=[stop], verispec=given)).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)


def test_calls_go_on_behind_what_the_client_has(served: Served) -> None:
    """Cut anywhere, in every interface: numbers, ids, arguments and the reason of the end are those of the whole."""
    fields = chat_body(**{**ASK, "max_tokens": 150}, tools=[LOOK, SAY], tool_choice="required", return_token_ids=True)
    whole = served.post(CHAT, fields).json()["choices"][0]
    token_ids, calls = whole["token_ids"], whole["message"]["tool_calls"]
    named = {call["id"]: call["function"] for call in calls}
    message = asked(MESSAGES, tools=[theirs(LOOK), theirs(SAY)], tool_choice={"type": "any"}, max_tokens=150)
    response = asked(RESPONSES, tools=[flat(LOOK), flat(SAY)], tool_choice="required", max_output_tokens=150)
    inside = 0
    for end in [*range(1, len(token_ids), len(token_ids) // 16), len(token_ids) - 1]:
        own = {"verispec": {"committed_ids": [token_ids[:end]]}}
        rest = served.stream(CHAT, {**fields, **own, "stream": True})
        deltas = [d for f in rest[:-1] for d in f.data["choices"][0]["delta"].get("tool_calls", ())]
        told = {delta["index"]: "" for delta in deltas}
        for delta in deltas:
            told[delta["index"]] += delta["function"]["arguments"]
            assert delta.get("id") in (None, calls[delta["index"]]["id"])
            assert delta["function"].get("name") in (None, calls[delta["index"]]["function"]["name"])
        assert list(told) == [*range(len(calls))][len(calls) - len(told) :], end
        for number, text in told.items():
            arguments = calls[number]["function"]["arguments"]
            is_begun = number == min(told) and "id" not in deltas[0]
            assert arguments.endswith(text) if is_begun else arguments == text
            inside += is_begun
        assert rest[-2].data["choices"][0]["finish_reason"] == whole["finish_reason"]
        choice = served.post(CHAT, {**fields, **own}).json()["choices"][0]
        assert choice["finish_reason"] == whole["finish_reason"]
        assert choice["message"].get("tool_calls", []) == calls[len(calls) - len(told) :], end
        content = served.post(MESSAGES, {**message, **own}).json()["content"]
        blocks = [block for block in content if block["type"] == "tool_use"]
        assert [b["id"] for b in blocks] == [*named][len(calls) - len(told) :]
        output = served.post(RESPONSES, {**response, **own}).json()["output"]
        items = [item for item in output if item["type"] == "function_call"]
        assert [i["call_id"] for i in items] == [*named][len(calls) - len(told) :]
        for block, item in zip(blocks, items, strict=True):
            assert item["arguments"] == named[block["id"]]["arguments"]
            assert block["input"] in ({}, json.loads(item["arguments"]))
    assert inside > 2  # control: some were cut inside of a call


def test_a_crowd_changes_no_constrained_answer(served: Served) -> None:
    bodies = [chat_body(**{**ASK, "seed": seed}, response_format=FORMAT) for seed in range(3)]
    bodies += [chat_body(**{**ASK, "seed": seed}, tools=[LOOK, SAY], tool_choice="required") for seed in range(3)]
    bodies += [chat_body(**{**ASK, "seed": 9, "max_tokens": 60})]
    alone = [served.post(CHAT, body).json()["choices"] for body in bodies]
    with ThreadPoolExecutor(len(bodies)) as pool:
        together = list(pool.map(lambda body: served.post(CHAT, body).json()["choices"], bodies))
    assert together == alone
    assert len(set(map(str, alone[:6]))) > 3  # control: seeds make a difference


def test_a_schema_and_tools_give_an_object_or_calls(served: Served) -> None:
    kinds = set()
    for seed in range(12):
        body = {**ASK, "seed": seed, "tools": [strict(LOOK)], "response_format": FORMAT}
        message = served.chat(**body)["choices"][0]["message"]
        kinds.add(message["content"] is None)
        text = message["content"] or message["tool_calls"][0]["function"]["arguments"]
        jsonschema.validate(json.loads(text), SCHEMA)
    assert kinds == {True, False}


FAMILIES = {
    "mistral": "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}"
    "[TOOL_CALLS] [{{ c.id }}{% endfor %}{% endfor %}",
    "mistral_args": "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}"
    "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}",
    "llama3_json": "<|python_tag|>{{ tools | tojson }}{% for m in messages %}{{ m.content }}{{ m.tool_calls }}"
    "{% endfor %}",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_call_in_their_own_way(family: str, tmp_path: Path) -> None:
    """Mistral's calls begin with a control token, which is text to nobody but the reader."""
    model = write_chat_model(tmp_path / "tiny.gguf", template=FAMILIES[family], control=["[TOOL_CALLS]", "[ARGS]"])
    with loaded(model, tmp_path) as llm, serving(llm) as served:
        fields = {**ASK, "tools": [LOOK, SAY], "tool_choice": "required", "parallel_tool_calls": False}
        answer = served.chat(**fields, return_token_ids=True)["choices"][0]
        (call,) = answer["message"]["tool_calls"]
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
        text = llm.tokenizer.decode(answer["token_ids"])
        special = llm.tokenizer.special_texts
        control = [special[i] for i in answer["token_ids"] if special.get(i) in ("[TOOL_CALLS]", "[ARGS]")]
        if family == "mistral":
            assert text.startswith(' [{"name": ')
            assert control == ["[TOOL_CALLS]"]
            assert len(call["id"]) == 9
        elif family == "mistral_args":
            assert text == call["function"]["name"] + call["function"]["arguments"]
            assert control == ["[TOOL_CALLS]", "[ARGS]"]
            assert len(call["id"]) == 9
        else:
            assert text.startswith('{"name": ')
            assert '"parameters": ' in text
            assert not control
        assert joined_calls(served.stream(CHAT, chat_body(**fields, stream=True))) == [call]
        given = {"committed_ids": [answer["token_ids"][:-9]]}
        rest = joined_calls(served.stream(CHAT, chat_body(**fields, stream=True, verispec=given)), is_rest=True)
        assert rest
        assert call["function"]["arguments"].endswith(rest[0]["function"]["arguments"])
        auto = served.chat(**{**fields, "tool_choice": "auto", "max_tokens": 20})["choices"][0]["message"]
        assert "tool_calls" not in auto or auto["tool_calls"]


def test_a_receipt_of_a_call_is_replayed_and_checked(served: Served) -> None:
    body = {**ASK, "tools": [LOOK, SAY], "tool_choice": "required", "verispec": {"receipt": True}}
    receipt_id = served.chat(**body)["verispec"]["receipt"]
    assert served.post("/verispec/replay", {"id": receipt_id}).json()["reproduced"] is True
    found = served.post("/verispec/check", {"id": receipt_id}).json()
    assert found["equal"], found


BAD_SCHEMA = {"type": "object", "properties": {"a": {"anyOf": [{"type": "string"}, {"type": "no such"}]}}}
PLACE = "properties.a.anyOf[1]"


@pytest.mark.parametrize(("path", "fields", "param"), [
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": BAD_SCHEMA}}},
     f"response_format.json_schema.schema.{PLACE}"),
    (CHAT, {"structured_outputs": {"json": BAD_SCHEMA}}, f"structured_outputs.json.{PLACE}"),
    (CHAT, {"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    (CHAT, {"structured_outputs": {"regex": "(["}}, "structured_outputs.regex"),
    (CHAT, {"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs.grammar"),
    (CHAT, {"structured_outputs": {"grammar": chained_rules(2990)}}, "structured_outputs.grammar"),
    (CHAT, {"structured_outputs": {"json": {"allOf": patterns(39)}}}, "structured_outputs.json"),
    (CHAT, {"tools": [LOOK] + [{"type": "function", "function": {"name": f"f{i}"}} for i in range(1500)],
            "tool_choice": "required"}, "tools"),
    (CHAT, {"structured_outputs": {}}, "structured_outputs"),
    (CHAT, {"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    (CHAT, {"structured_outputs": {"regex": "a"}, "tools": [LOOK]}, "structured_outputs.regex"),
    (CHAT, {"structured_outputs": {"regex": "a"}, "response_format": FORMAT}, "structured_outputs"),
    (CHAT, {"response_format": {"type": "xml"}}, "response_format.type"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "parameters": BAD_SCHEMA, "strict": True}}]},
     f"tools[0].function.parameters.{PLACE}"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}],
            "tool_choice": "required"}, "tools[0].function.parameters.type"),
    (CHAT, {"tools": [LOOK], "tool_choice": "required", "max_tokens": 0}, "max_tokens"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x", "schema": BAD_SCHEMA}}},
     f"text.format.schema.{PLACE}"),
    (RESPONSES, {"tools": [{"type": "function", "name": "f", "parameters": BAD_SCHEMA, "strict": True}]},
     f"tools[0].parameters.{PLACE}"),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": BAD_SCHEMA}}},
     f"output_config.format.schema.{PLACE}"),
    (MESSAGES, {"tools": [{"name": "f", "input_schema": BAD_SCHEMA}], "tool_choice": {"type": "any"}},
     f"tools[0].input_schema.{PLACE}"),
])  # fmt: skip
def test_what_cannot_be_followed_is_named_with_its_place(
    served: Served, path: str, fields: dict[str, Any], param: str
) -> None:
    answer = served.post(path, {**asked(path), **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
