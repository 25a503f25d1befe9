"""A draft model must mean by every id what the target means: what differs is named, and nothing is drafted with it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.support.tiny_llm import CONFIG, TOKENS, loaded, write_model
from verispec.errors import InputError
from verispec.model.tokenizer import check_same_vocabulary
from verispec.types import SamplingParams


@dataclass(frozen=True)
class Words:
    """A tokenizer as far as vocabularies are compared."""

    words: tuple[str, ...]

    @property
    def vocab_size(self) -> int:
        return len(self.words)

    def token_bytes(self, token_id: int) -> bytes:
        return b"" if self.words[token_id].startswith("<|") else self.words[token_id].encode()  # as special ones are

    def token_text(self, token_id: int) -> str:
        return self.words[token_id]


def refusal(target: str, draft: str, *, logits: int = 8, draft_logits: int = 8) -> str:
    here, there = (Words(tuple(text.split())) for text in (target, draft))
    try:
        check_same_vocabulary(here, there, logits=logits, draft_logits=draft_logits)  # type: ignore[arg-type]
    except InputError as error:
        return str(error)
    return ""


def test_equal_vocabularies_pass() -> None:
    assert refusal("a b c", "a b c") == ""
    assert refusal("a <|end|>", "a <|end|>") == ""
    assert refusal("", "") == ""


@pytest.mark.parametrize(
    ("target", "draft", "message"),
    [
        ("a b c", "a B c", "the draft model's vocabulary is not the model's: token 1 is 'B' there and 'b' here"),
        ("a <|end|>", "a <|stop|>", "the draft model's vocabulary is not the model's: token 1 is '<|stop|>' there and "
                                    "'<|end|>' here"),
        ("a b", "b a", "the draft model's vocabulary is not the model's: token 0 is 'b' there and 'a' here; "
                       "token 1 is 'a' there and 'b' here"),
        ("a b c d e f", "A B C D E f", "the draft model's vocabulary is not the model's: token 0 is 'A' there and 'a' "
                                       "here; token 1 is 'B' there and 'b' here; token 2 is 'C' there and 'c' here; "
                                       "and 2 more"),
        ("a b", "a b c", "the draft model's vocabulary has 3 tokens, the model's 2: token 2 is 'c' there alone"),
        ("a b c", "a b", "the draft model's vocabulary has 2 tokens, the model's 3: token 2 is 'c' here alone"),
        ("a b c d e f", "a", "the draft model's vocabulary has 1 tokens, the model's 6: token 1 is 'b' here alone; "
                             "token 2 is 'c' here alone; token 3 is 'd' here alone; and 2 more"),
        ("a b", "x b c", "the draft model's vocabulary has 3 tokens, the model's 2: token 0 is 'x' there and 'a' here; "
                         "token 2 is 'c' there alone"),
    ],
)  # fmt: skip
def test_what_differs_is_named(target: str, draft: str, message: str) -> None:
    assert refusal(target, draft) == message


def test_logits_of_another_width_are_refused() -> None:
    assert refusal("a b", "a b", logits=4, draft_logits=2) == (
        "the draft model has logits for 2 tokens, the model for 4"
    )


# Real files


OTHER = ["A" if token == "a" else token for token in TOKENS]
LONGER = [*TOKENS, "xyz"]


@pytest.mark.parametrize(
    ("vocab_size", "tokens", "message"),
    [
        (len(TOKENS), OTHER, "the draft model's vocabulary is not the model's: token 1 is 'A' there and 'a' here"),
        (len(LONGER), LONGER, "the draft model's vocabulary has 34 tokens, the model's 33: token 33 is 'xyz' there "
                              "alone"),
        (len(TOKENS) + 3, TOKENS, "the draft model has logits for 36 tokens, the model for 33"),
    ],
    ids=["another entry", "one more", "wider logits"],
)  # fmt: skip
def test_a_model_of_another_vocabulary_is_refused(
    tmp_path: Path, vocab_size: int, tokens: list[str], message: str
) -> None:
    types = [3, *[1] * (len(tokens) - 1)]
    merges = [merge for merge in ("a b", "Ġ a", "t h", "e r") if "a" not in merge or tokens != OTHER]
    draft = write_model(
        tmp_path / "draft.gguf", replace(CONFIG, vocab_size=vocab_size), tokens=tokens, token_type=types, merges=merges
    )
    model = write_model(tmp_path / "model.gguf")
    with pytest.raises(InputError) as error, loaded(model, tmp_path, draft_model=draft, drafter="model"):
        pass
    assert str(error.value) == message


def test_a_model_of_another_size_and_the_same_vocabulary_drafts(tmp_path: Path) -> None:
    smaller = replace(CONFIG, num_layers=1, hidden_size=64, mlp_size=32, seed=3, tied_head=False)
    draft = write_model(tmp_path / "draft.gguf", smaller)
    model = write_model(tmp_path / "model.gguf")
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=1)
    with loaded(model, tmp_path) as llm:
        (expected,) = llm.generate("abc the other", params)
    options = {"draft_model": draft, "drafter": "model", "tree": "beam:3,2", "force": True}
    with loaded(model, tmp_path, **options) as llm:
        (found,) = llm.generate("abc the other", params)
    assert found.digest == expected.digest
    assert found.stats.drafted > 0
