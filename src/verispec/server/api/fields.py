"""What requests of several interfaces hold, and the bounds on it."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

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


class Drawing(Struct, kw_only=True, forbid_unknown_fields=True):
    """How tokens are drawn and where an answer stops, under the names that most interfaces share."""

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
    seed: Annotated[int, Meta(ge=0)] | None = None
    structured_outputs: StructuredOutputs | None = None

    honoured: ClassVar[frozenset[str]] = frozenset((
        "min_tokens", "ignore_eos", "stop", "stop_token_ids", "include_stop_str_in_output", "temperature", "top_p",
        "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "seed",
        "structured_outputs",
    ))  # fmt: skip
    inert: ClassVar[frozenset[str]] = frozenset()
    refused: ClassVar[frozenset[str]] = frozenset()


class Sampling(Drawing, kw_only=True, forbid_unknown_fields=True):
    """All fields that decide tokens."""

    max_tokens: Count | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    prompt_logprobs: Alternatives | None = None
    response_format: dict[str, Any] | None = None

    honoured: ClassVar[frozenset[str]] = Drawing.honoured | {"max_tokens", "n", "prompt_logprobs", "response_format"}


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


def is_too_deep(value: Any, levels: int = MAX_DEPTH) -> bool:
    """Whether objects and lists lie in one another more than so many times."""
    if not isinstance(value, _CONTAINERS):
        return False
    if isinstance(value, Struct):
        value = [getattr(value, name) for name in value.__struct_fields__]
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(is_too_deep(each, levels - 1) for each in inner if isinstance(each, _CONTAINERS))
