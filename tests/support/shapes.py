"""A vocabulary that can write JSON, for models without weights; and the schemas that are tried on it."""

from __future__ import annotations

from typing import Any

from tests.support.tiny_llm import TOKENIZER
from verispec.constraints import Compiler
from verispec.model.gguf_tokenizer import tokenizer_from_gguf
from verispec.sampling.constraint import Grammar
from verispec.types import SamplingParams

_CHARACTERS = "Ġ" + "".join(map(chr, range(0x21, 0x7F)))
JSON_TOKENS = ["<|end|>", *_CHARACTERS, '{"', '":', "tr", "ue", "true", "na", "me", "name", "ag", "age", ",Ġ"]
JSON_VOCABULARY: dict[str, Any] = {
    **TOKENIZER,
    "tokens": JSON_TOKENS,
    "merges": ['{ "', '" :', "t r", "u e", "tr ue", "n a", "m e", "na me", "a g", "ag e", ", Ġ"],
    "token_type": [3, *[1] * (len(JSON_TOKENS) - 1)],
}
VOCABULARY = tokenizer_from_gguf({f"tokenizer.ggml.{key}": value for key, value in JSON_VOCABULARY.items()})
VOCAB_SIZE, END = len(JSON_TOKENS), 0
COMPILER = Compiler(VOCABULARY, VOCAB_SIZE)
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def compiled(params: SamplingParams) -> Grammar:
    assert params.constraint is not None
    return COMPILER.compile(params.constraint)
