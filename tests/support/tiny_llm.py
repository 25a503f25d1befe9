"""A tiny model file with a tokenizer, quick to load and to run, whose random answers use the whole vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_models import TinyConfig, write_gguf
from verispec.backends.cost import CostTable
from verispec.llm import LLM

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
TOKENS = ["<|end|>", *"abcdefghijklmnopqrstuvwxyz", "Ġ", ":", "ab", "Ġa", "th", "er"]
TOKENIZER = {
    "model": "gpt2", "pre": "smollm", "tokens": TOKENS, "merges": ["a b", "Ġ a", "t h", "e r"],
    "token_type": [3, *[1] * (len(TOKENS) - 1)], "bos_token_id": 0, "eos_token_id": 0, "add_bos_token": False,
}  # fmt: skip
CONFIG = TinyConfig(num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, mlp_size=48,
                    vocab_size=len(TOKENS), tied_head=True)  # fmt: skip


def write_model(
    path: Path, config: TinyConfig = CONFIG, *, metadata: Mapping[str, Any] | None = None, **tokenizer: object
) -> Path:
    """Write the model; the same bytes every time. `tokenizer` are fields of it that differ, `metadata` is added."""
    described = {f"tokenizer.ggml.{key}": value for key, value in {**TOKENIZER, **tokenizer}.items()}
    write_gguf(path, config, metadata={**described, "tokenizer.chat_template": TEMPLATE, **(metadata or {})})
    return path


def fix_cost(llm: LLM) -> None:
    """Every pass costs the same from now on: what is drafted must not depend on what else the machine does."""
    llm.calibration = replace(llm.calibration, cost=CostTable((1, 1 << 20), (3e-4, 3e-4), (0.0, 0.0)))
    llm.engine = llm.fresh_engine()


@contextmanager
def loaded(path: Path, cache: Path, **options: object) -> Iterator[LLM]:
    """The model, with the audit's outcome kept in `cache` instead of the user's own folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        llm = LLM(path, **{"drafter": "none", **options})  # type: ignore[arg-type]
    with llm:
        yield llm
