"""Blocks of tokens end exactly where single tokens would: stop strings, stop ids, EOS, min and max tokens, text.

S1-S5: a drafter that is always right makes the engine commit blocks of up to 17 tokens; drafter `none` commits one by
one. Everything a client sees must be equal, and the finish must be the first event in token order.
"""

from __future__ import annotations

import itertools

import pytest

from tests.support.drafters import Eager
from tests.support.fake_backend import FakeBackend
from verispec.engine import Engine, Request
from verispec.spec.registry import DRAFTERS, DraftSetup
from verispec.spec.turn import SequenceView
from verispec.text.detokenizer import TextStream
from verispec.types import Draft, FinishReason, SampleOutput, SamplingParams, TokenEvent

PROMPT = [1, 2, 3]
# Tokens of one to four bytes, some of them halves of characters: 6+7 is "é", 8+9+10 together are a smiley.
PIECES = [
    b"a",
    b"b",
    b"ab",
    b"ba",
    b" ",
    b"c",
    b"\xc3",
    b"\xa9",
    b"\xf0\x9f",
    b"\x99",
    b"\x82",
    b"d",
    b"cd",
    b"x",
    b"y",
    b"z",
]


class ToyTokenizer:
    strips_leading_space = False

    def token_bytes(self, token_id: int) -> bytes:
        return PIECES[token_id]


class Oracle(Eager):
    """Drafts what drafter `none` produced."""

    def __init__(self, truth: tuple[int, ...]) -> None:
        self._truth = truth

    def guess(self, sequence: SequenceView, num_nodes: int) -> Draft:
        done = len(sequence.token_ids) - sequence.prompt_len
        return Draft.chain(self._truth[done : done + num_nodes])


def run(
    params: SamplingParams, *, truth: tuple[int, ...] | None = None, eos: tuple[int, ...] = (), context_len: int = 128
) -> tuple[SampleOutput, list[TokenEvent]]:
    drafters = {"none": DRAFTERS["none"](DraftSetup())} if truth is None else {"oracle": Oracle(truth)}
    engine = Engine(FakeBackend(model_seed=4, context_len=context_len), family=(4, 8, 32), drafters=drafters)
    request = Request(PROMPT, params, eos_ids=eos, text=lambda: TextStream(ToyTokenizer(), params.stop))
    engine.add(request)
    events: list[TokenEvent] = []
    while engine.has_work:
        events += engine.step()
        engine.check()
    output = events[-1].output
    assert output is not None
    return output, events


TRUTH = run(SamplingParams(max_tokens=100, temperature=1.0, seed=3))[0].token_ids


def test_the_truth_is_worth_testing() -> None:
    assert len(set(TRUTH)) > 10
    text = b"".join(PIECES[t] for t in TRUTH).decode("utf-8", errors="replace")
    assert "\N{REPLACEMENT CHARACTER}" in text


STOPS: list[tuple[str, ...]] = [
    (), ("ab",), ("aba",), ("b", "ab"), ("cd", "d"), ("é",), ("a b",), ("bb", "ba"), ("xyz", "z"),
    ("\N{REPLACEMENT CHARACTER}",),
]  # fmt: skip


@pytest.mark.parametrize("stop", STOPS, ids=repr)
@pytest.mark.parametrize(
    ("stop_ids", "eos", "ignore_eos"), [((), (), False), ((5,), (11,), False), ((5,), (11,), True)]
)
def test_a_block_ends_where_single_tokens_would(
    stop: tuple[str, ...], stop_ids: tuple[int, ...], eos: tuple[int, ...], ignore_eos: bool
) -> None:
    for min_tokens, max_tokens in itertools.product((0, 1, 5, 17, 18), (18, 40, 100)):
        params = SamplingParams(
            max_tokens=max_tokens, min_tokens=min_tokens, temperature=1.0, seed=3, stop=stop, stop_ids=stop_ids,
            ignore_eos=ignore_eos,
        )  # fmt: skip
        single, _ = run(params, eos=eos)
        block, events = run(params, truth=single.token_ids, eos=eos)
        assert (block.token_ids, block.text, block.finish_reason) == (
            single.token_ids,
            single.text,
            single.finish_reason,
        )
        assert block.digest == single.digest
        assert "".join(e.text for e in events) == block.text
        assert sum((e.token_ids for e in events), ()) == block.token_ids
        assert [e.output is not None for e in events] == [False] * (len(events) - 1) + [True]
        check_finish(block, params, eos)


def check_finish(output: SampleOutput, params: SamplingParams, eos: tuple[int, ...]) -> None:
    """The finish, recomputed from the tokens alone."""
    stopping = set(params.stop_ids) | (set() if params.ignore_eos else set(eos))
    tokens = output.token_ids
    for count in range(params.min_tokens, len(tokens)):
        if count:
            assert tokens[count - 1] not in stopping, "an earlier token ended the request"
    if output.finish_reason is FinishReason.LENGTH:
        assert len(tokens) == params.max_tokens
    elif tokens[-1] not in stopping:
        whole = b"".join(PIECES[t] for t in tokens).decode("utf-8", errors="replace")
        assert whole.startswith(output.text)
        assert any(whole[len(output.text) :].startswith(s) for s in params.stop)
    assert len(tokens) >= params.min_tokens


def test_eos_is_masked_before_min_tokens() -> None:
    """S4: no stopping token before min_tokens, at its exact boundary."""
    stopping = tuple(range(0, 16, 2))
    for min_tokens in range(1, 12):
        params = SamplingParams(max_tokens=50, min_tokens=min_tokens, temperature=1.0, seed=1, stop_ids=stopping)
        output, _ = run(params)
        assert not set(output.token_ids[: min_tokens - 0][: min_tokens - 1]) & set(stopping)
        assert len(output.token_ids) >= min_tokens


@pytest.mark.parametrize("below", range(20))
def test_requests_at_the_context_limit(below: int) -> None:
    """S5: prompt + output end at the context limit, with blocks as with single tokens."""
    context_len = len(PROMPT) + 30 - below
    params = SamplingParams(max_tokens=None, temperature=1.0, seed=3)
    single, _ = run(params, context_len=context_len)
    block, _ = run(params, truth=single.token_ids, context_len=context_len)
    assert len(single.token_ids) == context_len - len(PROMPT)
    assert single.finish_reason is FinishReason.LENGTH
    assert block.digest == single.digest
    assert block.token_ids == TRUTH[: len(block.token_ids)]


def test_blocks_are_really_committed() -> None:
    """The control of this file: the oracle drafter does commit many tokens at once."""
    _, events = run(SamplingParams(max_tokens=60, temperature=1.0, seed=3), truth=TRUTH)
    assert max(len(e.token_ids) for e in events) >= 17
