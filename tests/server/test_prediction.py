"""OpenAI's `prediction`: it changes no token, and usage tells how much of it came true, whatever was drafted."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.support.served import Served
from verispec.server.prediction import num_accepted


@pytest.mark.parametrize(
    ("prediction", "answer", "expected"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], 4),
        ([1, 2, 3, 4], [1, 2, 9, 3, 4], 4),
        ([1, 2, 3, 4], [1, 2, 9, 4, 8], 2),  # one token alone behind a difference does not count
        ([1, 2, 3, 4], [3, 4, 1, 2], 2),  # in order
        ([1, 2], [1, 2, 1, 2, 1, 2], 2),
        ([], [1, 2], 0),
        ([1, 2], [], 0),
    ],
)
def test_tokens_that_came_true(prediction: list[int], answer: list[int], expected: int) -> None:
    assert num_accepted(prediction, answer) == expected


def test_never_more_than_two_texts_have_in_common() -> None:
    rng = random.Random(0)
    for _ in range(200):
        a, b = (rng.choices(range(4), k=rng.randrange(30)) for _ in range(2))
        assert 0 <= num_accepted(a, b) <= min(len(a), len(b))
        assert num_accepted(a, a) == len(a)


def test_a_prediction_changes_no_token_and_is_told_of(served: Served) -> None:
    body: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "seed": 5, "return_token_ids": True}
    plain = served.chat("hello", **body)
    (choice,) = plain["choices"]
    text = choice["message"]["content"]
    parts = [{"type": "text", "text": text[:4]}, {"type": "text", "text": text[4:]}]
    counted = []
    for content in (text, parts, "zzz" + text[:6], "zzzz"):
        for speculative in (None, False):
            answer = served.chat(
                "hello",
                prediction={"type": "content", "content": content},
                verispec={"speculative": speculative},
                **body,
            )
            assert answer["choices"] == plain["choices"]
            details = answer["usage"]["completion_tokens_details"]
            counted.append((details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]))
    assert counted[::2] == counted[1::2], "it is about the texts, not about drafts"
    (whole, _), (in_parts, _), (some, not_some), (nothing, all_) = counted[::2]
    assert whole == in_parts > some > nothing == 0
    assert not_some > 0
    assert all_ > 0


def test_a_prediction_of_too_many_tokens_is_refused_by_name(served: Served) -> None:
    answer = served.post(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "prediction": {"type": "content", "content": "x y " * 20_000}},
    )
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "prediction"
    assert error["message"].endswith("tokens; at most 32768 are possible")


@pytest.mark.parametrize("content", [[{"type": "image_url"}], [{"type": "text"}], 7])
def test_a_prediction_that_is_no_text_is_refused(served: Served, content: Any) -> None:
    answer = served.post(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "prediction": {"type": "content", "content": content}},
    )
    assert answer.status_code == 400
    assert "prediction" in answer.json()["error"]["message"]
