"""Text in which some control tokens are meant and others are only written.

`Tokenizer.encode` takes every control token that is written in a text for the token itself. Here a prompt is a list of
parts: control tokens by their ids, and plain text that becomes what the same tokenizer makes of it with control tokens
switched off; tokens that are not control tokens (`<think>` of some models) are found in it as ever.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import tokenizers
from tokenizers import AddedToken

from verispec.errors import InputError
from verispec.model.fields import quoted
from verispec.model.tokenizer import Tokenizer, library_encoding

# Both supplementary private use areas: neither letters nor white space, so that templates leave them as they are.
_PRIVATE_USE = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


class ControlToken(NamedTuple):
    """Where a control token is written in a text, with the white space that belongs to it."""

    start: int
    end: int
    token_id: int


def find_control_tokens(tokenizer: Tokenizer, text: str) -> list[ControlToken]:
    """What `encode` takes for control tokens, from left to right; only what is written literally, not up to Unicode."""
    encoding = library_encoding(tokenizer.backend, text)
    found = (
        ControlToken(*span, token_id)
        for token_id, span in zip(encoding.ids, encoding.offsets, strict=True)
        if token_id in tokenizer.special_ids
    )
    return [token for token in found if _is_written(tokenizer, token.token_id, text[token.start : token.end])]


def encode_parts(tokenizer: Tokenizer, parts: Sequence[str | int]) -> list[int]:
    """Token ids of plain texts and of control tokens, which are given by their ids.

    White space next to a control token is taken as it is. Raises `InputError` where the vocabulary makes a control
    token even of plain text.
    """
    mark = next(unused_characters(part for part in parts if isinstance(part, str)))
    text = "".join(part if isinstance(part, str) else mark for part in parts)
    control_ids = iter([part for part in parts if isinstance(part, int)])
    backend, renamed = _plain_backend(tokenizer, mark)
    encoding = library_encoding(backend, text)
    ids: list[int] = []
    for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
        written = text[start:end]
        if written == mark:
            ids.append(next(control_ids))
        elif token_id in tokenizer.special_ids and _is_written(tokenizer, token_id, written):
            raise InputError(
                f"the model's vocabulary has no way to write {quoted(written)} that is not a control token"
            )
        else:
            ids.append(renamed.get(token_id, token_id))
    return ids


def unused_characters(texts: Iterable[str]) -> Iterator[str]:
    """Characters that are in none of the texts, from the private use areas. Looks at the texts when first asked."""
    used = set[str]().union(*texts)
    yield from (character for character in map(chr, chain(*_PRIVATE_USE)) if character not in used)
    raise InputError("the messages use all of Unicode's private characters, of which a few are needed to encode them")


def _plain_backend(tokenizer: Tokenizer, mark: str) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
    """The same tokenizer with `mark` in place of all control tokens, and its ids that have to be renamed.

    The library shares model, normaliser and pre-tokenizer between the two, so this costs microseconds. It numbers the
    added tokens that are not in the model's own vocabulary anew.
    """
    backend = tokenizers.Tokenizer(tokenizer.backend.model)
    if tokenizer.backend.normalizer is not None:
        backend.normalizer = tokenizer.backend.normalizer
    if tokenizer.backend.pre_tokenizer is not None:
        backend.pre_tokenizer = tokenizer.backend.pre_tokenizer
    added = tokenizer.backend.get_added_tokens_decoder()
    kept = {token_id: token for token_id, token in added.items() if not token.special}
    backend.add_tokens([*kept.values(), AddedToken(mark, normalized=False)])
    new_ids = {backend.token_to_id(token.content): token_id for token_id, token in kept.items()}
    return backend, {new_id: token_id for new_id, token_id in new_ids.items() if new_id is not None}


def _is_written(tokenizer: Tokenizer, token_id: int, text: str) -> bool:
    return text.strip() == tokenizer.special_texts[token_id].strip()
