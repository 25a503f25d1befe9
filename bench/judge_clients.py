"""What `bench/judges.py` runs inside the environment of a client: a question, answered whole and as a stream, equally.

python bench/judge_clients.py NAME URL MODEL
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

QUESTION = "What is the capital of France?"
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
LIMITS: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "seed": 1}


def with_litellm(url: str, model: str) -> None:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import litellm

    where: dict[str, Any] = {"api_base": f"{url}/v1", "api_key": "none", "messages": MESSAGES}
    whole = litellm.completion(f"openai/{model}", **where, **LIMITS)
    parts = litellm.completion(f"openai/{model}", **where, **LIMITS, stream=True)
    check(whole.choices[0].message.content, "".join(part.choices[0].delta.content or "" for part in parts))
    claude: dict[str, Any] = {"api_base": url, "api_key": "none", "messages": MESSAGES, "max_tokens": 12}
    check(litellm.completion(f"anthropic/{model}", **claude, temperature=0).choices[0].message.content, None)


def with_langchain(url: str, model: str) -> None:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=model, max_tokens=12, temperature=0, seed=1)
    check(chat.invoke(QUESTION).content, "".join(str(part.content) for part in chat.stream(QUESTION)))
    responses = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=model, use_responses_api=True, max_tokens=12)
    check(responses.invoke(QUESTION).text, None)


def with_agents(url: str, model: str) -> None:
    os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"
    from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner
    from openai import AsyncOpenAI

    async def ask() -> None:
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
        settings = ModelSettings(max_tokens=12, temperature=0)
        agent = Agent(name="judge", model=OpenAIResponsesModel(model, client), model_settings=settings)
        whole = await Runner.run(agent, QUESTION)
        streamed = Runner.run_streamed(agent, QUESTION)
        async for _ in streamed.stream_events():
            pass
        check(whole.final_output, streamed.final_output)

    asyncio.run(ask())


def with_llm(url: str, model: str) -> None:
    from llm.default_plugins.openai_models import Chat

    chat = Chat(model, model_name=model, api_base=f"{url}/v1", key="none")
    chat.needs_key = None
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "seed": 1}
    check(chat.prompt(QUESTION, stream=False, **options).text(), "".join(chat.prompt(QUESTION, **options)))


def check(whole: str | None, streamed: str | None) -> None:
    """Something was said, and said again by the stream."""
    assert whole, "the answer is empty"
    assert streamed is None or streamed == whole, f"{streamed!r} was streamed, and {whole!r} answered whole"


if __name__ == "__main__":
    name, url, model = sys.argv[1:]
    {"litellm": with_litellm, "langchain-openai": with_langchain, "openai-agents": with_agents, "llm": with_llm}[name](
        url, model
    )
