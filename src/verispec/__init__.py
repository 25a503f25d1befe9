"""verispec: an LLM inference engine that is fast and bit-for-bit reproducible.

>>> from verispec import LLM, SamplingParams
>>> llm = LLM("smollm2-135m")
>>> llm.generate("The capital of France is", SamplingParams(max_tokens=8))[0].text
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verispec.async_llm import AsyncLLM
    from verispec.config import EngineConfig
    from verispec.engine import Engine, Request
    from verispec.errors import VerispecError
    from verispec.llm import LLM, Completion, ScoreResult
    from verispec.types import FinishReason, SampleOutput, SamplingParams, TokenEvent, TokenLogprob

__version__ = "0.1.0"

_MODULES = {
    "async_llm": ("AsyncLLM",),
    "config": ("EngineConfig",),
    "engine": ("Engine", "Request"),
    "errors": ("VerispecError",),
    "llm": ("LLM", "Completion", "ScoreResult"),
    "types": ("FinishReason", "SampleOutput", "SamplingParams", "TokenEvent", "TokenLogprob"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}
__all__ = [
    "LLM", "AsyncLLM", "Completion", "Engine", "EngineConfig", "FinishReason", "Request", "SampleOutput",
    "SamplingParams", "ScoreResult", "TokenEvent", "TokenLogprob", "VerispecError", "__version__",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    # Loaded on first use: `verispec --help` must not wait for numpy and the tokenizer library.
    if name not in _HOMES:
        raise AttributeError(f"module 'verispec' has no attribute {name!r}")
    return getattr(import_module(f"verispec.{_HOMES[name]}"), name)
