"""What clients send to OpenAI's interfaces."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from verispec.server.api.fields import (
    MAX_MESSAGES,
    MAX_TOKENS_GIVEN,
    Alternatives,
    Count,
    Drawing,
    Extension,
    Messages,
    Positive,
    Sampling,
    StreamOptions,
    TokenId,
    TokenIds,
    Tools,
)


class Completing(Sampling, kw_only=True, forbid_unknown_fields=True):
    """What chat completions and completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    verispec: Extension | None = None
    user: Any = None

    honoured: ClassVar[frozenset[str]] = Sampling.honoured | {
        "model", "stream", "stream_options", "return_token_ids", "add_special_tokens", "verispec",
    }  # fmt: skip
    inert: ClassVar[frozenset[str]] = frozenset(("user",))


class Prediction(Struct, kw_only=True, forbid_unknown_fields=True):
    """What the client expects to be answered."""

    type: Literal["content"]
    content: str | list[dict[str, Any]]


class ChatRequest(Completing, kw_only=True, forbid_unknown_fields=True):
    """/v1/chat/completions"""

    messages: Messages
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    tool_choice: str | dict[str, Any] | None = None
    prediction: Prediction | None = None
    modalities: list[str] | None = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Any = None
    verbosity: Any = None
    audio: Any = None
    web_search_options: Any = None
    functions: Any = None
    function_call: Any = None
    moderation: Any = None
    chat_template: Any = None

    honoured: ClassVar[frozenset[str]] = Completing.honoured | {
        "messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
        "max_completion_tokens", "logprobs", "top_logprobs", "tool_choice", "parallel_tool_calls", "prediction",
        "modalities",
    }  # fmt: skip
    inert: ClassVar[frozenset[str]] = frozenset((
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "prompt_cache_options", "reasoning_effort", "verbosity",
    ))  # fmt: skip
    refused: ClassVar[frozenset[str]] = frozenset(
        ("audio", "web_search_options", "functions", "function_call", "moderation", "chat_template")
    )


class CompletionRequest(Completing, kw_only=True, forbid_unknown_fields=True):
    """/v1/completions"""

    prompt: str | Annotated[list[str | TokenId | TokenIds], Meta(min_length=1, max_length=MAX_TOKENS_GIVEN)]
    logprobs: Alternatives | None = None
    echo: bool | None = None
    best_of: Positive | None = None
    suffix: Any = None

    honoured: ClassVar[frozenset[str]] = Completing.honoured | {"prompt", "logprobs", "echo", "best_of"}
    refused: ClassVar[frozenset[str]] = frozenset(("suffix",))


class ResponsesRequest(Drawing, kw_only=True, forbid_unknown_fields=True):
    """/v1/responses"""

    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    top_logprobs: Alternatives | None = None
    stream: bool | None = None
    stream_options: Any = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    verispec: Extension | None = None
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: Any = None
    include: list[str] | None = None
    truncation: Any = None
    client_metadata: Any = None
    max_tool_calls: Any = None
    context_management: Any = None
    moderation: Any = None
    access_programs: Any = None
    background: bool | None = None
    image: Any = None
    conversation: Any = None
    previous_response_id: Any = None
    prompt: Any = None

    honoured: ClassVar[frozenset[str]] = Drawing.honoured | {
        "input", "model", "instructions", "max_output_tokens", "top_logprobs", "include", "stream", "tools",
        "tool_choice", "parallel_tool_calls", "text", "verispec", "background",
    }  # fmt: skip
    inert: ClassVar[frozenset[str]] = frozenset((
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "prompt_cache_options", "reasoning", "truncation", "client_metadata", "max_tool_calls", "stream_options",
        "access_programs",
    ))  # fmt: skip
    refused: ClassVar[frozenset[str]] = frozenset(
        ("conversation", "previous_response_id", "prompt", "moderation", "image", "context_management")
    )
