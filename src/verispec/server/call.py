"""What one HTTP request asks of the engine, made of a client's fields."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verispec.sampling.constraint import Grammar
from verispec.server.api import Extension, Sampling, Speculative
from verispec.server.errors import wrong
from verispec.server.tool_use import ToolUse
from verispec.strict_json import numbered
from verispec.types import MAX_SEED_BITS, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What one HTTP request asks of the engine. `params.seed` is never None. `skip` are tokens, by choice, that the
    client has seen: they are drawn again, and not told. `shown_ids` are control tokens that have text. `cache_salt`
    keeps its cached prefixes apart from others of the tenant.
    """

    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    extension: Extension
    tenant: str
    keeps_stop: bool = False
    skip: Mapping[int, int] = field(default_factory=dict)
    tools: ToolUse = field(default_factory=ToolUse)
    grammar: Grammar | None = None  # what `params` say of the answer, compiled
    prediction_ids: Sequence[int] = ()
    shown_ids: Sequence[int] = ()
    cache_salt: str | None = None

    @property
    def salt(self) -> str:
        """What requests must have in common to share cached prefixes. No tenant's name has a space."""
        return self.tenant if self.cache_salt is None else f"{self.tenant} {self.cache_salt}"

    @property
    def num_choices(self) -> int:
        """Samples of all prompts together."""
        return len(self.prompts) * self.params.n


def sampling_params(
    body: Sampling, extension: Extension | None, defaults: Mapping[str, Any], **instead: Any
) -> SamplingParams:
    """The parameters that a client's fields mean, with a seed in any case. `instead` goes above them, by name."""
    named = {
        name: getattr(body, name)
        for name in (
            "max_tokens", "min_tokens", "ignore_eos", "temperature", "top_p", "min_p", "presence_penalty",
            "frequency_penalty", "repetition_penalty", "n", "seed", "prompt_logprobs",
        )
    }  # fmt: skip
    named["top_k"] = None if body.top_k is None else max(0, body.top_k)
    named["stop"] = None if body.stop is None else [body.stop] if isinstance(body.stop, str) else body.stop
    named["stop_ids"] = body.stop_token_ids
    named["logit_bias"] = None if body.logit_bias is None else numbered(body.logit_bias, name="logit_bias")
    named["deterministic"] = None if extension is None else extension.deterministic
    chosen = {"temperature": 1.0, **defaults}
    chosen |= {name: value for name, value in {**named, **instead}.items() if value is not None}
    chosen.setdefault("max_tokens", None)
    chosen.setdefault("seed", secrets.randbits(MAX_SEED_BITS))
    return SamplingParams.from_mapping(chosen)


def refuse_trace(extension: Extension | None) -> None:
    """Raise 400 for interfaces whose frames have no room for it."""
    if extension is not None and extension.trace:
        raise wrong("verispec.trace", "only the frames of chat completions and completions tell of drafts")


def speculation(asked: bool | Speculative | None) -> Any:
    """As the library takes it. vLLM's number of tokens is a chain of that length."""
    if not isinstance(asked, Speculative):
        return asked
    chosen = {name: getattr(asked, name) for name in ("method", "tree", "accept") if getattr(asked, name) is not None}
    if asked.num_speculative_tokens is not None:
        chosen.setdefault("tree", f"chain:{asked.num_speculative_tokens}")
    return chosen
