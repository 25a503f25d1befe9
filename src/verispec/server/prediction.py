"""What a client predicts of the answer: its text, and how much of it came true. It is about texts, not drafts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from verispec.errors import InputError
from verispec.server.api import Prediction


def predicted_text(prediction: Prediction | None) -> str:
    """Its parts put together; nothing where there is none."""
    content = "" if prediction is None else prediction.content
    if isinstance(content, str):
        return content
    texts = [part["text"] for part in content if part.get("type") == "text" and isinstance(part.get("text"), str)]
    if len(texts) < len(content):
        raise InputError("prediction.content must be text, or a list of parts of type text")
    return "".join(texts)


def num_accepted(prediction_ids: Sequence[int], token_ids: Sequence[int]) -> int:
    """How many tokens of the prediction the answer has, in order. Behind a difference two in a row count again."""
    places: dict[tuple[int, int], list[int]] = {}
    for i, pair in enumerate(pairwise(prediction_ids)):
        places.setdefault(pair, []).append(i)
    count, cursor, last, is_last_counted = 0, 0, -1, True
    for token_id in token_ids:
        if cursor < len(prediction_ids) and prediction_ids[cursor] == token_id:
            count, cursor, is_last_counted = count + 1, cursor + 1, True
        else:
            found = places.get((last, token_id), ())
            at = bisect_right(found, cursor - 1)
            if at < len(found):
                count, cursor = count + 2 - is_last_counted, found[at] + 2
            is_last_counted = at < len(found)
        last = token_id
    return count
