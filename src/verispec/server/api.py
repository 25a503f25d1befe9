"""The requests that clients send, as types: what is not of such a type is refused, and the field is named.

Every field is *honoured*, *inert* (taken and ignored, since it cannot change a token) or *refused* (known, and answered
with 400 unless it is null): each request says which are which. A field that no interface knows is refused too.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from verispec.types import MAX_ALTERNATIVES, MAX_INT

MAX_TOKENS_GIVEN = 2**20
MAX_MESSAGES = 4096
MAX_PROMPTS = 1024
MAX_N = 128
MAX_DEPTH = 32  # of what a field holds
_CONTAINERS = (dict, list, Struct)

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
    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None

    honoured: ClassVar[frozenset[str]] = frozenset((
        "max_tokens", "min_tokens", "ignore_eos", "stop", "stop_token_ids", "include_stop_str_in_output", "temperature",
        "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "n",
        "seed", "prompt_logprobs", "response_format", "structured_outputs",
    ))  # fmt: skip
    inert: ClassVar[frozenset[str]] = frozenset()
    refused: ClassVar[frozenset[str]] = frozenset()


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

    honoured: ClassVar[frozenset[str]] = frozenset((
        "model", "prompt", "content", "messages", "tools", "chat_template_kwargs", "add_generation_prompt",
        "continue_final_message", "add_special_tokens", "add_special", "return_token_strs", "with_pieces",
    ))  # fmt: skip
    inert: ClassVar[frozenset[str]] = frozenset()
    refused: ClassVar[frozenset[str]] = frozenset()


class DetokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """/detokenize"""

    model: str | None = None
    tokens: TokenIds

    honoured: ClassVar[frozenset[str]] = frozenset(("model", "tokens"))
    inert: ClassVar[frozenset[str]] = frozenset()
    refused: ClassVar[frozenset[str]] = frozenset()


class TemplateRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """/apply-template"""

    model: str | None = None
    messages: Messages
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    honoured: ClassVar[frozenset[str]] = frozenset((
        "model", "messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
    ))  # fmt: skip
    inert: ClassVar[frozenset[str]] = frozenset()
    refused: ClassVar[frozenset[str]] = frozenset()


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

    honoured: ClassVar[frozenset[str]] = frozenset((
        "input", "model", "instructions", "max_output_tokens", "temperature", "top_p", "top_logprobs", "include",
        "stream", "tools", "tool_choice", "parallel_tool_calls", "text", "structured_outputs", "seed", "verispec",
        "background",
    ))  # fmt: skip
    inert: ClassVar[frozenset[str]] = frozenset((
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "prompt_cache_options", "reasoning", "truncation", "client_metadata", "max_tool_calls", "stream_options",
        "access_programs",
    ))  # fmt: skip
    refused: ClassVar[frozenset[str]] = frozenset(
        ("conversation", "previous_response_id", "prompt", "moderation", "image", "context_management")
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
    context_management: dict[str, Any] | None = None
    inference_geo: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None
    diagnostics: Any = None
    speed: Any = None
    container: Any = None
    mcp_servers: Any = None

    honoured: ClassVar[frozenset[str]] = frozenset((
        "messages", "max_tokens", "model", "system", "temperature", "top_p", "top_k", "stop_sequences", "stream",
        "tools", "tool_choice", "seed", "verispec", "output_config", "context_management",
    ))  # fmt: skip
    inert: ClassVar[frozenset[str]] = frozenset((
        "metadata", "service_tier", "thinking", "cache_control", "inference_geo", "user_profile_id", "workspace_id",
        "diagnostics", "speed",
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
    context_management: dict[str, Any] | None = None
    user_profile_id: Any = None
    workspace_id: Any = None
    speed: Any = None

    honoured: ClassVar[frozenset[str]] = frozenset(
        ("messages", "model", "system", "tools", "tool_choice", "context_management")
    )
    inert: ClassVar[frozenset[str]] = frozenset(
        ("thinking", "output_config", "cache_control", "user_profile_id", "workspace_id", "speed")
    )
    refused: ClassVar[frozenset[str]] = frozenset()


class GenerateSampling(Sampling, kw_only=True, forbid_unknown_fields=True):
    """`sampling_params` of /generate, also under SGLang's own names. Control tokens are never put apart by spaces."""

    max_new_tokens: Count | None = None
    min_new_tokens: Count | None = None
    sampling_seed: Annotated[int, Meta(ge=0)] | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: Any = None
    custom_params: Any = None

    honoured: ClassVar[frozenset[str]] = (Sampling.honoured - {"prompt_logprobs"}) | {
        "max_new_tokens", "min_new_tokens", "sampling_seed", "no_stop_trim", "skip_special_tokens",
    }  # fmt: skip
    inert: ClassVar[frozenset[str]] = frozenset(("spaces_between_special_tokens",))
    refused: ClassVar[frozenset[str]] = frozenset(("custom_params", "prompt_logprobs"))


class GenerateRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """/generate: text or tokens in, text and tokens out; of several prompts, a list. `logprob_start_len` is the first
    token of the prompt that has a log-probability in the answer, -1 for none.
    """

    text: str | Annotated[list[str], Meta(min_length=1, max_length=MAX_PROMPTS)] | None = None
    input_ids: Annotated[list[TokenId | TokenIds], Meta(min_length=1, max_length=MAX_TOKENS_GIVEN)] | None = None
    sampling_params: GenerateSampling | None = None
    return_logprob: bool | None = None
    logprob_start_len: Annotated[int, Meta(ge=-1, le=MAX_INT)] | None = None
    top_logprobs_num: Alternatives | None = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None
    rid: Any = None
    verispec: Extension | None = None

    honoured: ClassVar[frozenset[str]] = frozenset((
        "text", "input_ids", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num",
        "return_text_in_logprobs", "stream", "verispec",
    ))  # fmt: skip
    inert: ClassVar[frozenset[str]] = frozenset(("rid",))
    refused: ClassVar[frozenset[str]] = frozenset()


class ReplayRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """/verispec/replay and /verispec/check: a receipt, or the id of one that this server keeps."""

    id: str | None = None
    receipt: dict[str, Any] | None = None
    prompt_ids: TokenIds | None = None

    honoured: ClassVar[frozenset[str]] = frozenset(("id", "receipt", "prompt_ids"))
    inert: ClassVar[frozenset[str]] = frozenset()
    refused: ClassVar[frozenset[str]] = frozenset()


class TokensSampling(Sampling, kw_only=True, forbid_unknown_fields=True):
    """`sampling_params` of /inference/v1/generate. How text is written is of no interest where there is none."""

    logprobs: Alternatives | None = None
    detokenize: Any = None
    skip_special_tokens: Any = None
    spaces_between_special_tokens: Any = None
    bad_words: Any = None
    extra_args: Any = None

    honoured: ClassVar[frozenset[str]] = Sampling.honoured | {"logprobs"}
    inert: ClassVar[frozenset[str]] = frozenset(("detokenize", "skip_special_tokens", "spaces_between_special_tokens"))
    refused: ClassVar[frozenset[str]] = frozenset(("bad_words", "extra_args"))


class TokensRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """/inference/v1/generate: tokens in, tokens out. Requests of the same `cache_salt` share cached prefixes."""

    token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_TOKENS_GIVEN)]
    sampling_params: TokensSampling | None = None
    model: str | None = None
    stream: bool | None = None
    request_id: Annotated[str, Meta(max_length=256)] | None = None
    priority: Any = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    verispec: Extension | None = None

    honoured: ClassVar[frozenset[str]] = frozenset(
        ("token_ids", "sampling_params", "model", "stream", "request_id", "cache_salt", "verispec")
    )
    inert: ClassVar[frozenset[str]] = frozenset(("priority",))
    refused: ClassVar[frozenset[str]] = frozenset()


def is_too_deep(value: Any, levels: int = MAX_DEPTH) -> bool:
    """Whether objects and lists lie in one another more than so many times."""
    if not isinstance(value, _CONTAINERS):
        return False
    if isinstance(value, Struct):
        value = [getattr(value, name) for name in value.__struct_fields__]
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(is_too_deep(each, levels - 1) for each in inner if isinstance(each, _CONTAINERS))
