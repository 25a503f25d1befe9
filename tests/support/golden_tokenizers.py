"""The small tokenizers of tests/goldens, one of every kind that needs no model file."""

import gzip
import json
from pathlib import Path
from typing import Any

from verispec.model.gguf_tokenizer import tokenizer_from_gguf

GOLDENS = Path(__file__).parents[1] / "goldens" / "tokenizers"
SMALL_KINDS = ("gpt-2", "qwen2", "llama-bpe", "sentencepiece")
KINDS = ("smollm", *SMALL_KINDS)
STRINGS: list[str] = json.loads((GOLDENS / "strings.json").read_text())["strings"]


def small_metadata(kind: str) -> dict[str, Any]:
    metadata: dict[str, Any] = json.loads(gzip.decompress((GOLDENS / f"{kind}.vocab.json.gz").read_bytes()))
    return metadata


SMALL = {kind: tokenizer_from_gguf(small_metadata(kind)) for kind in SMALL_KINDS}
