"""What `bench/judges.py` runs inside the environment of a client: typed answers and calls of tools, whole and streamed.

python bench/judge_tools.py NAME URL MODEL
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any, Literal

from pydantic import BaseModel, Field

QUESTION = "Is it warm in Paris? Look at the weather."
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
LIMITS: dict[str, Any] = {"max_tokens": 200, "temperature": 0, "seed": 1}


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome", "Oslo"]
    is_warm: bool
    degrees: int = Field(ge=-30, le=50)


def with_openai(url: str, model: str) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    ask: dict[str, Any] = {"model": model, "messages": MESSAGES, **LIMITS}
    parsed = client.chat.completions.parse(**ask, response_format=Weather).choices[0].message.parsed
    assert isinstance(parsed, Weather)
    with client.chat.completions.stream(**ask, response_format=Weather) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed
    tools: dict[str, Any] = {"tools": [openai.pydantic_function_tool(Weather)], "tool_choice": "required"}
    called = calls_of(client.chat.completions.parse(**ask, **tools))
    with client.chat.completions.stream(**ask, **tools) as stream:
        pieces = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
        assert calls_of(stream.get_final_completion()) == called
    assert len(pieces) > len(called)
    own: dict[str, Any] = {"model": model, "input": QUESTION, "max_output_tokens": 200, "temperature": 0}
    answer = client.responses.parse(**own, text_format=Weather)
    assert answer.output_parsed == parsed
    with client.responses.stream(**own, text_format=Weather) as streamed:
        assert streamed.get_final_response().output_parsed == parsed
    tool: Any = openai.pydantic_function_tool(Weather)["function"]
    flat: Any = {"tools": [{"type": "function", **tool}], "tool_choice": "required"}
    items = [item for item in client.responses.create(**own, **flat).output if item.type == "function_call"]
    assert [json.loads(item.arguments) for item in items] == [call.model_dump() for call in called]
    result = {"type": "function_call_output", "call_id": items[0].call_id, "output": "21 degrees"}
    history: Any = [*MESSAGES, items[0].to_dict(), result]
    assert client.responses.create(**{**own, "input": history}, tools=flat["tools"]).output


def calls_of(answer: Any) -> list[Any]:
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls", choice.finish_reason
    found = [call.function.parsed_arguments for call in choice.message.tool_calls]
    assert found
    assert all(isinstance(each, Weather) for each in found)
    return found


def with_anthropic(url: str, model: str) -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    tools = [{"name": "weather", "description": "looks", "input_schema": Weather.model_json_schema()}]
    greedy = {"temperature": 0, "seed": 1}
    ask: Any = {"model": model, "max_tokens": 200, "messages": MESSAGES, "tools": tools, "extra_body": greedy}
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        message = client.messages.create(**ask, tool_choice=choice)
        blocks = [block for block in message.content if block.type == "tool_use"]
        assert message.stop_reason == "tool_use"
        assert [Weather.model_validate(block.input) for block in blocks]
        with client.messages.stream(**ask, tool_choice=choice) as stream:
            assert stream.get_final_message().content == message.content
    used = [block.to_dict() for block in message.content]
    results = [{"type": "tool_result", "tool_use_id": block["id"], "content": "21 degrees"} for block in used]
    history = [*MESSAGES, {"role": "assistant", "content": used}, {"role": "user", "content": results}]
    assert client.messages.create(**{**ask, "messages": history, "max_tokens": 8}).content
    plain = {key: value for key, value in ask.items() if key != "tools"}
    assert isinstance(client.messages.parse(**plain, output_format=Weather).parsed_output, Weather)


def with_langchain(url: str, model: str) -> None:
    from langchain_openai import ChatOpenAI

    where: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "none", "model": model, "max_tokens": 200}
    for by_responses in (False, True):
        chat = ChatOpenAI(**where, temperature=0, use_responses_api=by_responses)
        for method in ("json_schema", "function_calling"):
            assert isinstance(chat.with_structured_output(Weather, method=method).invoke(QUESTION), Weather)
        bound = chat.bind_tools([Weather], tool_choice="any")
        whole = [call["args"] for call in bound.invoke(QUESTION).tool_calls]
        assert [Weather.model_validate(arguments) for arguments in whole]
        first, *rest = bound.stream(QUESTION)
        for part in rest:
            first += part
        assert [call["args"] for call in first.tool_calls] == whole


def with_agents(url: str, model: str) -> None:
    os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"
    from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
    from openai import AsyncOpenAI

    asked: list[str] = []

    @function_tool
    def weather(city: Literal["Paris", "Rome", "Oslo"]) -> str:
        """The weather of a city."""
        asked.append(city)
        return f"It is warm in {city}."

    async def ask() -> None:
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
        for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
            settings = ModelSettings(max_tokens=200, temperature=0, tool_choice="required")
            common: Any = {"name": "judge", "model": kind(model, client)}
            agent = Agent(**common, model_settings=settings, tools=[weather], tool_use_behavior="stop_on_first_tool")
            whole = await Runner.run(agent, QUESTION)
            streamed = Runner.run_streamed(agent, QUESTION)
            async for _ in streamed.stream_events():
                pass
            assert asked
            assert whole.final_output == streamed.final_output == f"It is warm in {asked[-1]}."
            typed = Agent(**common, model_settings=ModelSettings(max_tokens=200, temperature=0), output_type=Weather)
            assert isinstance((await Runner.run(typed, QUESTION)).final_output, Weather)

    asyncio.run(ask())


if __name__ == "__main__":
    name, url, model = sys.argv[1:]
    judges = {
        "openai": with_openai, "anthropic": with_anthropic, "langchain-openai": with_langchain,
        "openai-agents": with_agents,
    }  # fmt: skip
    judges[name](url, model)
