"""The requests that clients send, as types: what is not of such a type is refused, and the field is named.

Every field is *honoured*, *inert* (taken and ignored, since it cannot change a token) or *refused* (known, and answered
with 400 unless it is null). A field that no interface knows is refused too.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from verispec.types import MAX_ALTERNATIVES, MAX_INT

MAX_TOKENS_GIVEN = 2**20
MAX_MESSAGES = 4096
MAX_PROMPTS = 1024
MAX_N = 128

Count = Annotated[int, Meta(ge=0, le=MAX_INT)]
Positive = Annotated[int, Meta(ge=1, le=MAX_INT)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_INT)]
TokenIds = Annotated[list[TokenId], Meta(max_length=MAX_TOKENS_GIVEN)]
Alternatives = Annotated[int, Meta(ge=0, le=MAX_ALTERNATIVES)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-100, le=100)]
Stops = str | Annotated[list[str], Meta(max_length=64)]


class Speculative(Struct, kw_only=True, forbid_unknown_fields=True):
    """Who drafts, and how drafts are judged."""

    method: str | None = None
    tree: str | None = None
    accept: str | None = None
    num_speculative_tokens: Positive | None = None


class Extension(Struct, kw_only=True, forbid_unknown_fields=True):
    """What only this server has. `committed_ids` are tokens the client has already, one list per sample."""

    deterministic: bool | None = None
    speculative: bool | Speculative | None = None
    trace: bool = False
    receipt: bool = False
    committed_ids: Annotated[list[TokenIds], Meta(max_length=MAX_N)] | None = None


class StreamOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether usage comes with a stream: at its end, or with every frame."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class StructuredOutputs(Struct, kw_only=True, forbid_unknown_fields=True):
    """What an answer has to look like, as vLLM names it. White space is never free here."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1, max_length=1024)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None


class Sampling(Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that decide tokens, under the names most interfaces share."""

    model: str | None = None
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop: Stops | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    include_stop_str_in_output: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_INT)] | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=1024)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    seed: Annotated[int, Meta(ge=0)] | None = None
    prompt_logprobs: Alternatives | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    verispec: Extension | None = None
    user: Any = None

    inert: ClassVar[frozenset[str]] = frozenset(("user",))
    refused: ClassVar[frozenset[str]] = frozenset()


class Message(Struct, kw_only=True, forbid_unknown_fields=True):
    """One message of a conversation."""

    role: str
    content: str | Annotated[list[dict[str, Any]], Meta(max_length=MAX_MESSAGES)] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None


Messages = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
Tools = Annotated[list[dict[str, Any]], Meta(max_length=1024)]


class Prediction(Struct, kw_only=True, forbid_unknown_fields=True):
    """What the client expects to be answered."""

    type: Literal["content"]
    content: str | list[dict[str, Any]]


class ChatRequest(Sampling, kw_only=True, forbid_unknown_fields=True):
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

    inert: ClassVar[frozenset[str]] = frozenset((
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "prompt_cache_options", "reasoning_effort", "verbosity",
    ))  # fmt: skip
    refused: ClassVar[frozenset[str]] = frozenset(
        ("audio", "web_search_options", "functions", "function_call", "moderation", "chat_template")
    )


class CompletionRequest(Sampling, kw_only=True, forbid_unknown_fields=True):
    """/v1/completions"""

    prompt: str | Annotated[list[str | TokenId | TokenIds], Meta(min_length=1, max_length=MAX_TOKENS_GIVEN)]
    logprobs: Alternatives | None = None
    echo: bool | None = None
    best_of: Positive | None = None
    suffix: Any = None

    refused: ClassVar[frozenset[str]] = frozenset(("suffix",))


class TokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """/tokenize: of a text, or of a conversation. `content`, `add_special` and `with_pieces` are llama.cpp's."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    return_token_strs: bool | None = None
    with_pieces: bool | None = None


class DetokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """/detokenize"""

    model: str | None = None
    tokens: TokenIds


class TemplateRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """/apply-template"""

    model: str | None = None
    messages: Messages
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class ResponsesRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """/v1/responses"""

    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Share | None = None
    top_logprobs: Alternatives | None = None
    stream: bool | None = None
    stream_options: Any = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    seed: Annotated[int, Meta(ge=0)] | None = None
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
    include: Any = None
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

    inert: ClassVar[frozenset[str]] = frozenset((
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "prompt_cache_options", "reasoning", "include", "truncation", "client_metadata",
        "max_tool_calls", "context_management", "stream_options", "access_programs",
    ))  # fmt: skip
    refused: ClassVar[frozenset[str]] = frozenset(
        ("conversation", "previous_response_id", "prompt", "moderation", "image")
    )


class MessagesRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """/v1/messages"""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Positive
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=0, le=MAX_INT)] | None = None
    stop_sequences: Annotated[list[str], Meta(max_length=64)] | None = None
    stream: bool | None = None
    tools: Tools | None = None
    tool_choice: dict[str, Any] | None = None
    seed: Annotated[int, Meta(ge=0)] | None = None
    verispec: Extension | None = None
    metadata: Any = None
    service_tier: Any = None
    thinking: Any = None
    output_config: dict[str, Any] | None = None
    cache_control: Any = None
    context_management: Any = None
    inference_geo: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None
    diagnostics: Any = None
    speed: Any = None
    container: Any = None
    mcp_servers: Any = None

    inert: ClassVar[frozenset[str]] = frozenset((
        "metadata", "service_tier", "thinking", "cache_control", "context_management", "inference_geo",
        "user_profile_id", "workspace_id", "diagnostics", "speed",
    ))  # fmt: skip
    refused: ClassVar[frozenset[str]] = frozenset(("container", "mcp_servers"))


class CountRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """/v1/messages/count_tokens"""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: Tools | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Any = None
    output_config: Any = None
    cache_control: Any = None
    context_management: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None
    speed: Any = None


class GenerateRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """/generate: text or tokens in, text and tokens out. `sampling_params` are the fields of /v1/completions."""

    text: str | None = None
    input_ids: TokenIds | None = None
    sampling_params: dict[str, Any] | None = None
    return_logprob: bool | None = None
    top_logprobs_num: Alternatives | None = None
    stream: bool | None = None
    rid: Any = None
    verispec: Extension | None = None


class ReplayRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """/verispec/replay and /verispec/check: a receipt, or the id of one that this server keeps."""

    id: str | None = None
    receipt: dict[str, Any] | None = None
    prompt_ids: TokenIds | None = None


class TokensRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """/inference/v1/generate: tokens in, tokens out. `sampling_params` are the fields of /v1/completions."""

    token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_TOKENS_GIVEN)]
    sampling_params: dict[str, Any] | None = None
    model: str | None = None
    stream: bool | None = None
    request_id: Any = None
    priority: Any = None
    cache_salt: Any = None
    verispec: Extension | None = None
