"""Whether two models speak of the same tokens: a draft model's ids must mean what the target's mean."""

from __future__ import annotations

from verispec.errors import InputError
from verispec.model.tokenizer import Tokenizer

_MOST_NAMED = 3


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer, *, logits: int, draft_logits: int) -> None:
    """Raise InputError that names the differing entries unless every id means the same to both models."""
    if target.vocab_size != draft.vocab_size:
        raise InputError(
            f"the draft model's vocabulary has {draft.vocab_size} tokens, the model's {target.vocab_size}: "
            f"{_differences(target, draft)}"
        )
    if differences := _differences(target, draft):
        raise InputError(f"the draft model's vocabulary is not the model's: {differences}")
    if logits != draft_logits:
        raise InputError(f"the draft model has logits for {draft_logits} tokens, the model for {logits}")


def _meaning(tokenizer: Tokenizer, token_id: int) -> tuple[bytes, str]:
    """A token's bytes; special tokens have none, but a text."""
    return tokenizer.token_bytes(token_id), tokenizer.token_text(token_id)


def _differences(target: Tokenizer, draft: Tokenizer) -> str:
    """The first entries that differ, in words; empty if none does."""
    shared = range(min(target.vocab_size, draft.vocab_size))
    differing = [i for i in shared if _meaning(target, i) != _meaning(draft, i)]
    named = [f"token {i} is {draft.token_text(i)!r} there and {target.token_text(i)!r} here" for i in differing]
    longer, where = (draft, "there") if draft.vocab_size > target.vocab_size else (target, "here")
    named += [f"token {i} is {longer.token_text(i)!r} {where} alone" for i in range(len(shared), longer.vocab_size)]
    rest = len(named) - _MOST_NAMED
    return "; ".join(named[:_MOST_NAMED]) + (f"; and {rest} more" if rest > 0 else "")
