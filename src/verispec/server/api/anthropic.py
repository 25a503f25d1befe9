"""What clients send to Anthropic's interface."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct

from verispec.server.api.fields import (
    MAX_MESSAGES,
    Extension,
    Positive,
    Share,
    Tools,
)
from verispec.types import MAX_INT


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
