"""What clients send to the interfaces that are about tokens, and to those about receipts."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct

from verispec.server.api.fields import (
    MAX_PROMPTS,
    MAX_TOKENS_GIVEN,
    Alternatives,
    Count,
    Extension,
    Messages,
    Sampling,
    StreamOptions,
    TokenId,
    TokenIds,
    Tools,
)
from verispec.types import MAX_INT


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
    log_metrics: Any = None
    verispec: Extension | None = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    input_embeds: Any = None
    lora_path: Any = None
    token_ids_logprob: Any = None
    return_hidden_states: Any = None
    return_routed_experts: Any = None
    session_params: Any = None

    honoured: ClassVar[frozenset[str]] = frozenset((
        "text", "input_ids", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num",
        "return_text_in_logprobs", "stream", "verispec",
    ))  # fmt: skip
    inert: ClassVar[frozenset[str]] = frozenset(("rid", "log_metrics"))
    refused: ClassVar[frozenset[str]] = frozenset((
        "image_data", "video_data", "audio_data", "input_embeds", "lora_path", "token_ids_logprob",
        "return_hidden_states", "return_routed_experts", "session_params",
    ))  # fmt: skip


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
    stream_options: StreamOptions | None = None
    request_id: Annotated[str, Meta(max_length=256)] | None = None
    priority: Any = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    verispec: Extension | None = None
    features: Any = None
    content_parts: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None

    honoured: ClassVar[frozenset[str]] = frozenset((
        "token_ids", "sampling_params", "model", "stream", "stream_options", "request_id", "cache_salt", "verispec",
    ))  # fmt: skip
    inert: ClassVar[frozenset[str]] = frozenset(("priority",))
    refused: ClassVar[frozenset[str]] = frozenset(
        ("features", "content_parts", "kv_transfer_params", "ec_transfer_params")
    )


class ReplayRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """/verispec/replay and /verispec/check: a receipt, or the id of one that this server keeps."""

    id: str | None = None
    receipt: dict[str, Any] | None = None
    prompt_ids: TokenIds | None = None

    honoured: ClassVar[frozenset[str]] = frozenset(("id", "receipt", "prompt_ids"))
    inert: ClassVar[frozenset[str]] = frozenset()
    refused: ClassVar[frozenset[str]] = frozenset()
