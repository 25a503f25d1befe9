"""The requests that clients send, as types: what is not of such a type is refused, and the field is named.

Every field is *honoured*, *inert* (taken and ignored, since it cannot change a token) or *refused* (known, and answered
with 400 unless it is null): each request says which are which. A field that no interface knows is refused too.
"""

from verispec.server.api.anthropic import (
    CountRequest,
    MessagesRequest,
)
from verispec.server.api.fields import (
    MAX_DEPTH,
    MAX_PROMPTS,
    Drawing,
    Extension,
    Message,
    Sampling,
    Speculative,
    StreamOptions,
    StructuredOutputs,
    is_too_deep,
)
from verispec.server.api.openai import (
    ChatRequest,
    Completing,
    CompletionRequest,
    Prediction,
    ResponsesRequest,
)
from verispec.server.api.tokens import (
    DetokenizeRequest,
    GenerateRequest,
    GenerateSampling,
    ReplayRequest,
    TemplateRequest,
    TokenizeRequest,
    TokensRequest,
    TokensSampling,
)

__all__ = [
    "MAX_DEPTH",
    "MAX_PROMPTS",
    "ChatRequest",
    "Completing",
    "CompletionRequest",
    "CountRequest",
    "DetokenizeRequest",
    "Drawing",
    "Extension",
    "GenerateRequest",
    "GenerateSampling",
    "Message",
    "MessagesRequest",
    "Prediction",
    "ReplayRequest",
    "ResponsesRequest",
    "Sampling",
    "Speculative",
    "StreamOptions",
    "StructuredOutputs",
    "TemplateRequest",
    "TokenizeRequest",
    "TokensRequest",
    "TokensSampling",
    "is_too_deep",
]
