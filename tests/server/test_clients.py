"""The clients that people have: OpenAI's and Anthropic's own, which check every answer against strict models."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

import pytest
from pydantic import BaseModel

from tests.support.served import Served, serving
from verispec.llm import LLM
from verispec.server import api

if TYPE_CHECKING:
    import anthropic
    import openai


def lazily(name: str) -> Any:
    """The module, imported when it is first used: that takes seconds, and every worker collects this file."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if not TYPE_CHECKING:
    anthropic, openai = lazily("anthropic"), lazily("openai")

MESSAGES: Any = [{"role": "user", "content": "hello"}]
KEY = "a-key-for-clients"
TOOL = {"name": "look", "description": "looks", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def keyed(chat_llm: LLM) -> Iterator[Served]:
    with serving(chat_llm, api_keys=(KEY,)) as server:
        yield server


@pytest.fixture(scope="module")
def client(keyed: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{keyed.url}/v1", api_key=KEY, max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


@pytest.fixture(scope="module")
def claude(keyed: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=keyed.url, api_key=KEY, max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


@pytest.fixture(scope="module")
def name(keyed: Served) -> str:
    return keyed.core.names[0]


def test_openai_chat(client: openai.OpenAI, name: str) -> None:
    ask: dict[str, Any] = {"model": name, "messages": MESSAGES, "seed": 1, "max_tokens": 8, "logprobs": True}
    answer = client.chat.completions.create(**ask, top_logprobs=2)
    content = answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 8
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == content
    used = chunks[-1].usage
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")  # what is cached or drafted depends on earlier ones
    assert [getattr(used, name) for name in counts] == [getattr(answer.usage, name) for name in counts]
    assert used.completion_tokens_details is not None
    assert chunks[0].system_fingerprint == answer.system_fingerprint


class Look(BaseModel):
    """Looks."""

    on: bool
    how: Literal["fast", "slow"]


def test_openai_typed_answers_and_calls(client: openai.OpenAI, name: str) -> None:
    ask: dict[str, Any] = {"model": name, "messages": MESSAGES, "seed": 1, "max_tokens": 200}
    parsed = client.chat.completions.parse(**ask, response_format=Look).choices[0].message.parsed
    assert isinstance(parsed, Look)
    own: dict[str, Any] = {"model": name, "input": "hello", "max_output_tokens": 200, "extra_body": {"seed": 1}}
    assert client.responses.parse(**own, text_format=Look).output_parsed == parsed
    tools: dict[str, Any] = {"tools": [openai.pydantic_function_tool(Look)], "tool_choice": "required"}
    answer = client.chat.completions.parse(**ask, **tools, parallel_tool_calls=False).choices[0]
    (call,) = answer.message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Look)
    with client.chat.completions.stream(**ask, **tools, parallel_tool_calls=False) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.content is answer.message.content is None
    assert [(each.id, each.function.arguments) for each in message.tool_calls or ()] == [
        (call.id, call.function.arguments)
    ]
    flat: Any = {"type": "function", **openai.pydantic_function_tool(Look)["function"]}
    forced: dict[str, Any] = {**own, "tools": [flat], "tool_choice": {"type": "function", "name": "Look"}}
    (item,) = client.responses.create(**forced, parallel_tool_calls=False).output
    assert item.arguments == call.function.arguments  # type: ignore[union-attr]
    events = list(client.responses.create(**forced, parallel_tool_calls=False, stream=True))
    assert events[-1].response.output == [item]


def test_anthropic_typed_answers_and_calls(claude: anthropic.Anthropic, name: str) -> None:
    tools: Any = [{"name": "look", "input_schema": Look.model_json_schema()}]
    ask: dict[str, Any] = {
        "model": name, "messages": MESSAGES, "max_tokens": 200, "tools": tools, "extra_body": {"seed": 1},
        "tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": True},
    }  # fmt: skip
    message = claude.messages.create(**ask)
    (block,) = message.content
    Look.model_validate(block.input)  # type: ignore[union-attr]
    assert message.stop_reason == "tool_use"
    with claude.messages.stream(**ask) as stream:
        assert stream.get_final_message().content == message.content


def test_openai_completions_and_models(keyed: Served, client: openai.OpenAI, name: str) -> None:
    answer = client.completions.create(model=name, prompt="abc", max_tokens=4, logprobs=1, seed=2)
    lenient = openai.OpenAI(base_url=client.base_url, api_key=KEY)  # OpenAI's own frames have a null reason as well
    chunks = lenient.completions.create(model=name, prompt="abc", max_tokens=4, seed=2, stream=True)
    assert "".join(c.choices[0].text for c in chunks) == answer.choices[0].text
    assert [model.id for model in client.models.list()] == [name]
    assert client.models.retrieve(name).id == name


def test_openai_responses(client: openai.OpenAI, name: str) -> None:
    tools: Any = [{"type": "function", "strict": False, **TOOL}, {"type": "web_search"}]
    ask: dict[str, Any] = {
        "model": name, "instructions": "be brief", "input": "hello", "max_output_tokens": 6, "tools": tools,
        "extra_body": {"seed": 3},
    }  # fmt: skip
    answer = client.responses.create(**ask)
    assert answer.status in ("completed", "incomplete")
    assert answer.verispec["skipped_tools"] == ["web_search"]  # type: ignore[attr-defined]
    events = list(client.responses.create(**ask, stream=True))
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created"
    assert kinds[-1] == f"response.{answer.status}"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == answer.output_text
    done = next(event for event in events if event.type == "response.output_item.done")
    assert done.item.content[0].text == text


def test_responses_and_messages_are_the_chat_completion(keyed: Served, client: openai.OpenAI, claude: Any) -> None:
    name = keyed.core.names[0]
    chat = client.chat.completions.create(model=name, messages=MESSAGES, max_tokens=6, seed=5, temperature=1.0)
    response = client.responses.create(
        model=name, input="hello", max_output_tokens=6, temperature=1.0, extra_body={"seed": 5}
    )
    message = claude.messages.create(
        model=name, messages=MESSAGES, max_tokens=6, extra_body={"seed": 5, "temperature": 1.0}
    )
    text = chat.choices[0].message.content
    assert response.output_text == message.content[0].text == text
    digests = {each.verispec["digest"] for each in (chat, response, message)}
    assert len(digests) == 1


def test_openai_items_of_a_conversation(keyed: Served, client: openai.OpenAI) -> None:
    items: Any = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "seen"},
    ]
    assert client.responses.create(model=keyed.core.names[0], input=items, max_output_tokens=2).output_text is not None
    with pytest.raises(openai.BadRequestError, match=r"input\[0\]"):
        client.responses.create(model=keyed.core.names[0], input=[{"type": "computer_call"}])  # type: ignore[list-item]


def test_anthropic_messages(claude: anthropic.Anthropic, name: str) -> None:
    tools: Any = [{"name": "look", "input_schema": {"type": "object"}}]
    ask: dict[str, Any] = {
        "model": name, "system": "be brief", "messages": MESSAGES, "max_tokens": 6, "tools": tools,
        "extra_body": {"seed": 4},
    }  # fmt: skip
    answer = claude.messages.create(**ask)
    assert answer.stop_reason in ("end_turn", "max_tokens")
    with claude.messages.stream(**ask) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == answer.content[0].text == final.content[0].text
    assert final.stop_reason == answer.stop_reason
    assert final.usage.output_tokens == answer.usage.output_tokens
    counted = claude.messages.count_tokens(model=name, system="be brief", messages=MESSAGES, tools=tools)
    assert counted.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    stop = claude.messages.create(**{**ask, "max_tokens": 40, "stop_sequences": [text[2:4]]})
    assert (stop.stop_reason, stop.stop_sequence) == ("stop_sequence", text[2:4])


def test_anthropic_blocks_of_a_conversation(claude: anthropic.Anthropic, name: str) -> None:
    conversation: Any = [
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "look", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "seen"}]},
    ]
    assert claude.messages.create(model=name, messages=conversation, max_tokens=2).content
    with pytest.raises(anthropic.BadRequestError, match=r"content\[0\]"):
        claude.messages.create(
            model=name, messages=[{"role": "user", "content": [{"type": "image", "source": {}}]}], max_tokens=2
        )  # type: ignore[list-item]


def test_errors_are_the_clients_own(keyed: Served, client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    name = keyed.core.names[0]
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    assert missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=name, messages=MESSAGES, temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="another-key").models.list()
    with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
        claude.messages.create(model="claude-9", messages=MESSAGES, max_tokens=1)


@pytest.mark.parametrize(("official", "ours"), [
    ("openai.types.chat.completion_create_params:CompletionCreateParamsBase", api.ChatRequest),
    ("openai.types.completion_create_params:CompletionCreateParamsBase", api.CompletionRequest),
    ("openai.types.responses.response_create_params:ResponseCreateParamsBase", api.ResponsesRequest),
    ("anthropic.types.message_create_params:MessageCreateParamsBase", api.MessagesRequest),
    ("anthropic.types.message_count_tokens_params:MessageCountTokensParams", api.CountRequest),
])  # fmt: skip
def test_every_official_field_is_known(official: str, ours: Any) -> None:
    """Honoured, inert or refused by name; none is unknown."""
    assert set(get_type_hints(resolve_name(official))) <= set(ours.__struct_fields__)


def test_a_served_model_answers_in_utf8(client: openai.OpenAI, name: str) -> None:
    answer = client.chat.completions.with_raw_response.create(
        model=name, messages=[{"role": "user", "content": "Grüße 世界 😀"}], max_tokens=3
    )
    assert json.loads(answer.text)["usage"]["prompt_tokens"] > 10
