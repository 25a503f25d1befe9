"""A tiny model that can read and write every text, with a chat template that shows all it is given."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.support.tiny_llm import write_model
from tests.support.tiny_models import TinyConfig

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if mood is defined %}{{ mood }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROL = ["<|end|>", "<|im_start|>", "<|im_end|>"]


def _byte_tokens() -> list[str]:
    """GPT-2's alphabet: one token per byte, so that every text can be encoded."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def write_chat_model(path: Path, *, template: str = CHATML, control: Sequence[str] = ()) -> Path:
    """A tiny model that can read and write every byte, with a chat template and perhaps more control tokens."""
    named = [*CONTROL, *control]
    tokens = [*named, *_byte_tokens(), "qz"]
    config = TinyConfig(
        num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, mlp_size=48, vocab_size=len(tokens),
        context_len=1024, tied_head=True,
    )  # fmt: skip
    types = [3] * len(named) + [1] * 257
    return write_model(
        path, config, metadata={"tokenizer.chat_template": template}, tokens=tokens, token_type=types, merges=["q z"]
    )
