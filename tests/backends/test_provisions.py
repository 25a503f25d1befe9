"""Masks, hidden states that go out, and rows that start from one: on every backend, or refused in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.backends.test_conformance import BACKENDS, PROMPT
from tests.support.passes import RowsBuilder, Tape, bind
from tests.support.tiny_models import TinyConfig, make_tensors
from verispec.backends.checks import check_pass
from verispec.backends.protocol import (
    Backend,
    Burst,
    DistributionWanted,
    DrawWanted,
    HiddenStart,
    HiddenWanted,
    LogprobsWanted,
    NoisyTopKWanted,
    Pass,
    PassKind,
    PassResult,
    TopKWanted,
    View,
    Wanted,
)
from verispec.errors import InputError
from verispec.sampling import draw
from verispec.sampling.draw import NO_TOKEN
from verispec.sampling.rows import SampleKey, plain_rows
from verispec.types import SamplingParams

COUNT = 6  # rows of a pass
ROWS = np.arange(COUNT, dtype=np.int32)
EVERYTHING, SOME, NOTHING = 0, 1, 2


@pytest.fixture(params=["fake", "numpy-llama", "numpy-gemma3", "native-llama", "native-gemma3", "hopper-gemma3"])
def make(request: pytest.FixtureRequest) -> Callable[[], Backend]:
    return BACKENDS[request.param]


@pytest.fixture
def backend(make: Callable[[], Backend]) -> Backend:
    return make()


def prompt_pass(backend: Backend, wanted: Wanted, token_ids: list[int] = PROMPT[:COUNT]) -> Pass:
    rows = RowsBuilder()
    _, update = Tape(backend, seq_row=1, first_slot=0).add_prompt_rows(rows, token_ids)
    return Pass(PassKind.CANONICAL, rows.build(8), wanted, update, head_shape=8 if len(wanted.head_rows()) else 0)


def masked(pass_: Pass, masks: list[int]) -> Pass:
    padding = [EVERYTHING] * (len(pass_.rows) - len(masks))
    return replace(pass_, rows=replace(pass_.rows, masks=np.array(masks + padding, np.int32)))


def as_bits(allowed: np.ndarray) -> np.ndarray:
    """[masks, vocabulary] as the words of a mask table."""
    width = -(-allowed.shape[1] // 32) * 32
    padded = np.pad(allowed, ((0, 0), (0, width - allowed.shape[1])))
    return np.packbits(padded, axis=1, bitorder="little").view(np.uint32)


def set_masks(backend: Backend) -> np.ndarray:
    """SOME allows every third token and the last, NOTHING none; returns what SOME allows."""
    allowed = np.arange(backend.limits.vocab_size) % 3 == 1
    allowed[-1] = True
    backend.set_masks(SOME, as_bits(np.stack([allowed, np.zeros_like(allowed)])))
    return allowed


def everything_wanted(vocab_size: int) -> Wanted:
    return Wanted(
        draw=DrawWanted(ROWS),
        logprobs=LogprobsWanted(ROWS, ROWS),
        top_k=TopKWanted(ROWS, vocab_size),
        noisy_top_k=NoisyTopKWanted(ROWS, 5),
        distribution=DistributionWanted(ROWS),
    )


PARAMS = {
    "greedy": SamplingParams(),
    "plain": SamplingParams(temperature=1.0),
    "filtered": SamplingParams(temperature=0.9, top_k=6, top_p=0.95, min_p=0.001),
    "edited": SamplingParams(temperature=1.1, repetition_penalty=1.3, logit_bias=((0, 20.0), (2, 20.0), (4, 3.0))),
}


@pytest.mark.parametrize("params", list(PARAMS.values()), ids=list(PARAMS))
def test_masks_decide_what_is_drawn_and_nothing_else(backend: Backend, params: SamplingParams) -> None:
    allowed = set_masks(backend)
    bind(backend, 1, params, seed=3)
    pass_ = prompt_pass(backend, everything_wanted(backend.limits.vocab_size))
    free, found = (backend.submit(p).result() for p in (pass_, masked(pass_, [SOME, EVERYTHING] * (COUNT // 2))))
    for result in (free, found):
        assert result.draw is not None
        assert result.noisy_top_k is not None
        assert result.top_k is not None
        assert result.distribution is not None
    shares = found.distribution.probabilities()
    for row in range(0, COUNT, 2):
        assert allowed[found.draw.token_ids[row]]
        children = found.noisy_top_k.token_ids[row]
        assert allowed[children[children != NO_TOKEN]].all()
        assert children[0] == found.draw.token_ids[row]
        assert not shares[row, ~allowed].any()
        assert np.isclose(shares[row].sum(), 1, atol=1e-6)
    for one, other in (
        (found.draw.token_ids, free.draw.token_ids),
        (found.draw.logprobs, free.draw.logprobs),
        (found.noisy_top_k.values, free.noisy_top_k.values),
        (shares, free.distribution.probabilities()),
    ):
        assert np.array_equal(one[1::2], other[1::2]), "rows without a mask are as they were"
    assert not np.array_equal(found.noisy_top_k.token_ids[::2], free.noisy_top_k.token_ids[::2])
    assert np.array_equal(found.top_k.values, free.top_k.values), "raw log-probabilities know no masks"
    assert np.array_equal(found.logprobs, free.logprobs)
    if not (params.has_penalties or params.logit_bias):
        logits = np.empty_like(free.top_k.values)
        np.put_along_axis(logits, free.top_k.token_ids, free.top_k.values, axis=-1)
        banned = np.where(allowed | (ROWS % 2 == 1)[:, None], logits, np.float32(-np.inf))
        expected = draw.draw(np, banned, plain_rows(params, SampleKey(3, 0), ROWS + 1))
        assert np.array_equal(found.draw.token_ids, expected.token_ids)


def test_where_nothing_is_allowed_nothing_is_drawn(backend: Backend) -> None:
    set_masks(backend)
    for params in (SamplingParams(), SamplingParams(temperature=1.0, top_k=3)):
        bind(backend, 1, params)
        pass_ = prompt_pass(backend, everything_wanted(backend.limits.vocab_size))
        result = backend.submit(masked(pass_, [NOTHING] + [EVERYTHING] * (COUNT - 1))).result()
        assert result.draw is not None
        assert result.noisy_top_k is not None
        assert result.draw.token_ids[0] == NO_TOKEN
        assert (result.noisy_top_k.token_ids[0] == NO_TOKEN).all()
        assert (result.draw.token_ids[1:] >= 0).all()


def test_masks_that_do_not_fit_are_refused(backend: Backend) -> None:
    words = np.zeros((1, -(-backend.limits.vocab_size // 32)), np.uint32)
    for first, bits in ((0, words), (backend.limits.num_masks, words), (1, words[:, :0])):
        with pytest.raises(InputError, match="do not fit"):
            backend.set_masks(first, bits)
    pass_ = prompt_pass(backend, Wanted(draw=DrawWanted(ROWS)))
    for masks in ([backend.limits.num_masks], [-1]):
        with pytest.raises(InputError, match="masks must lie in"):
            backend.submit(masked(pass_, masks))
    burst = replace(masked(pass_, [SOME] * COUNT), burst=Burst(ROWS[-1:], np.array([2], np.int32), 8))
    with pytest.raises(InputError, match="nobody to say the next mask"):
        backend.submit(burst)
    with pytest.raises(InputError, match="this backend has no masks"):
        check_pass(masked(pass_, [SOME]), replace(backend.limits, num_masks=0))


def hidden_of(backend: Backend, layers: tuple[int, ...], **changes: object) -> PassResult:
    vocab_size = backend.limits.vocab_size
    wanted = Wanted(hidden=HiddenWanted(ROWS, layers), top_k=TopKWanted(ROWS, vocab_size))
    found = backend.submit(replace(prompt_pass(backend, wanted), **changes)).result()  # type: ignore[arg-type]
    return replace(found, hidden=on_host(found.hidden))


def on_host(states: Any) -> np.ndarray:
    """A copy; a backend's own arrays may be a device's."""
    return np.array(states.cpu().numpy() if hasattr(states, "cpu") else states)


def test_hidden_states_are_those_of_a_reference(make: Callable[[], Backend]) -> None:
    """Before a layer they are what is left when that layer and all behind it are skipped, bit for bit."""
    backend = make()
    if not backend.limits.hidden:
        with pytest.raises(InputError, match="neither gives hidden states"):
            hidden_of(backend, (0,))
        return
    num_layers, width = backend.limits.hidden[0]
    found = hidden_of(backend, tuple(range(num_layers, -1, -1)))
    plain = backend.submit(prompt_pass(backend, Wanted(top_k=TopKWanted(ROWS, backend.limits.vocab_size)))).result()
    assert found.hidden.shape == (COUNT, num_layers + 1, width)
    assert found.top_k is not None
    assert plain.top_k is not None
    assert np.array_equal(found.top_k.values, plain.top_k.values), "whoever wants them changes nothing"
    for layer in range(num_layers + 1):
        behind = frozenset(range(layer, num_layers))
        left = hidden_of(backend, (num_layers,), view=View.without(behind, behind)).hidden[:, 0]
        assert np.array_equal(found.hidden[:, num_layers - layer], left), layer
    assert len({found.hidden[:, i].tobytes() for i in range(num_layers + 1)}) == num_layers + 1
    with pytest.raises(InputError, match="layers of hidden states"):
        hidden_of(backend, (num_layers + 1,))


@pytest.mark.parametrize("name", ["numpy-llama", "native-llama"])
def test_hidden_states_begin_with_the_embedding_and_end_with_what_the_head_reads(name: str) -> None:
    backend = BACKENDS[name]()
    config = TinyConfig(family="llama", seed=1, context_len=256)
    tensors, eps = make_tensors(config), config.architecture.norm_eps
    first, last = hidden_of(backend, (0, config.architecture.num_layers)).hidden.transpose(1, 0, 2)
    assert np.array_equal(first, tensors["embed"][PROMPT[:COUNT]])
    exact = last.astype(np.float64)
    normed = exact / np.sqrt((exact**2).mean(axis=-1, keepdims=True) + eps) * tensors["final_norm"]
    logits = normed @ tensors["head"].astype(np.float64).T
    expected = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    top_k = hidden_of(backend, (0,)).top_k
    assert top_k is not None
    assert np.allclose(top_k.values, np.take_along_axis(expected, top_k.token_ids, axis=-1), atol=1e-4)


def test_numpy_and_native_have_the_same_hidden_states() -> None:
    one, other = (hidden_of(BACKENDS[f"{name}-llama-mha"](), (1, 2)).hidden for name in ("numpy", "native"))
    assert np.allclose(one, other, atol=1e-4)
    assert not np.allclose(one[:, 0], other[:, 1], atol=1e-2)


def test_hidden_states_stay_while_others_are_made(backend: Backend) -> None:
    if not backend.limits.hidden:
        pytest.skip("refused, which another test shows")
    wanted = Wanted(hidden=HiddenWanted(ROWS, (0, 1)))
    kept = backend.submit(prompt_pass(backend, wanted)).result().hidden
    before = on_host(kept)
    backend.submit(prompt_pass(backend, wanted, PROMPT[20 : 20 + COUNT])).result()
    assert np.array_equal(on_host(kept), before)


def test_a_row_may_start_from_a_hidden_state(make: Callable[[], Backend]) -> None:
    """From another token's embedding a row is that token, in what it gives and in what later rows see of it."""
    backend = make()
    last = np.array([COUNT - 1], np.int32)
    other = [*PROMPT[:2], (PROMPT[2] + 1) % 16, *PROMPT[3:COUNT]]
    wanted = Wanted(logprobs=LogprobsWanted(last, last))
    if not backend.limits.hidden:
        with pytest.raises(InputError, match="nor starts from them"):
            backend.submit(replace(prompt_pass(backend, wanted), start=HiddenStart(last, np.zeros((1, 4)))))
        return
    with_states = Wanted(hidden=HiddenWanted(ROWS, (0,)), logprobs=wanted.logprobs)
    expected = backend.submit(prompt_pass(backend, with_states, other)).result()
    plain = backend.submit(prompt_pass(backend, wanted)).result().logprobs
    start = HiddenStart(np.array([2], np.int32), expected.hidden[2:3, 0])
    found = backend.submit(replace(prompt_pass(backend, wanted), start=start)).result().logprobs
    assert np.array_equal(found, expected.logprobs)
    assert not np.array_equal(found, plain)
    bad = (start._replace(states=start.states[:, :-1]), start._replace(rows=np.array([8], np.int32)))
    for wrong in bad:
        with pytest.raises(InputError, match="start from hidden states"):
            backend.submit(replace(prompt_pass(backend, wanted), start=wrong))
    burst = Burst(last, np.array([1], np.int32), 8)
    with pytest.raises(InputError, match="no further rounds"):
        backend.submit(replace(prompt_pass(backend, Wanted(draw=DrawWanted(last))), start=start, burst=burst))
