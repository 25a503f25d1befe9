"""What every backend must do. A new backend is one more entry in BACKENDS.

"Equal" means bit for bit. Shapes come from the audit's family, as in production.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.support.fake_backend import FakeBackend
from tests.support.passes import NO_UPDATE, RowsBuilder, Tape, bind, joined, run, run_logprobs
from tests.support.tiny_models import TinyConfig, make_tensors
from verispec.backends.audit import audit
from verispec.backends.native_backend import NativeBackend
from verispec.backends.numpy_backend import NumpyBackend
from verispec.backends.options import HopperOptions, LoadedModel, NativeOptions, NumpyOptions
from verispec.backends.protocol import (
    Backend,
    DistributionWanted,
    DrawWanted,
    LogprobsWanted,
    Noise,
    NoisyTopKWanted,
    Pass,
    PassKind,
    StaleHandleError,
    TopKWanted,
    View,
    Wanted,
)
from verispec.errors import InputError
from verispec.kv import NUM_RESERVED
from verispec.sampling import draw
from verispec.sampling.draw import NO_TOKEN
from verispec.sampling.rows import SampleKey, plain_rows
from verispec.types import NO_PARENT, Draft, SamplingParams

NUM_SLOTS = 600
RNG = np.random.default_rng(5)
PROMPT = RNG.integers(0, 16, 150).tolist()  # longer than a tile of 128 positions


def numpy_backend(family: str, **changes: object) -> NumpyBackend:
    configs = [TinyConfig(family=family, seed=seed, context_len=256, **changes) for seed in (1, 2)]  # type: ignore[arg-type]
    models = [LoadedModel(c.architecture, make_tensors(c).__getitem__) for c in configs]
    return NumpyBackend(models, NumpyOptions(num_slots=NUM_SLOTS, num_seq_rows=8, max_tail=32))


def native_backend(family: str, *, isa: str = "", kv_dtype: str = "float16", **changes: object) -> NativeBackend:
    configs = [TinyConfig(family=family, seed=seed, context_len=256, **changes) for seed in (1, 2)]  # type: ignore[arg-type]
    models = [LoadedModel(c.architecture, make_tensors(c).__getitem__) for c in configs]
    return NativeBackend(
        models, NativeOptions(num_slots=NUM_SLOTS, num_seq_rows=8, max_tail=32, isa=isa, kv_dtype=kv_dtype)
    )


def hopper_backend(family: str, **changes: object) -> NativeBackend:
    configs = [TinyConfig(family=family, seed=seed, context_len=256, **changes) for seed in (1, 2)]  # type: ignore[arg-type]
    models = [LoadedModel(c.architecture, make_tensors(c).__getitem__) for c in configs]
    return NativeBackend(models, HopperOptions(num_slots=NUM_SLOTS, num_seq_rows=8, max_tail=32))


BACKENDS: dict[str, Callable[[], Backend]] = {
    "fake": lambda: FakeBackend(num_slots=NUM_SLOTS, context_len=256, num_seq_rows=8, max_tail=32, num_stores=2),
    "numpy-llama": lambda: numpy_backend("llama"),
    "numpy-llama-mha": lambda: numpy_backend("llama", num_kv_heads=4, tied_head=True),
    "numpy-qwen2": lambda: numpy_backend("qwen2"),
    "numpy-qwen3": lambda: numpy_backend("qwen3"),
    "numpy-gemma3": lambda: numpy_backend("gemma3", num_layers=3, window=21, tied_head=True),
    "numpy-gemma3-wide": lambda: numpy_backend("gemma3", window=140),
    "native-llama": lambda: native_backend("llama"),
    "native-llama-mha": lambda: native_backend("llama", num_kv_heads=4, tied_head=True, kv_dtype="float32"),
    "native-qwen2": lambda: native_backend("qwen2", isa="portable"),
    "native-qwen3": lambda: native_backend("qwen3"),
    "native-gemma3": lambda: native_backend("gemma3", num_layers=3, window=21, tied_head=True),
    "native-gemma3-wide": lambda: native_backend("gemma3", window=140, kv_dtype="float32"),
    "hopper-qwen3": lambda: hopper_backend("qwen3"),
    "hopper-gemma3": lambda: hopper_backend("gemma3", num_layers=3, window=21, tied_head=True),
}


@pytest.fixture(scope="module", params=list(BACKENDS))
def backend(request: pytest.FixtureRequest) -> Backend:
    return BACKENDS[request.param]()


@pytest.fixture(scope="module")
def family(backend: Backend) -> tuple[int, ...]:
    shapes = audit(backend.probes(), shapes=(1, 4, 8, 16, 64, 256)).choose()
    assert {16, 64, 256} <= set(shapes)
    return shapes


def kv_bits(backend: Backend, store: int, slots: list[int]) -> bytes:
    if isinstance(backend, FakeBackend):
        return backend.kv[store, slots].tobytes()
    return b"".join(part.tobytes() for part in backend.kv(store, np.array(slots)))  # type: ignore[attr-defined]


def test_chunks_and_shapes_do_not_matter(backend: Backend, family: tuple[int, ...]) -> None:
    """A prompt in one pass, in chunks, or token by token: equal log-probabilities and equal K/V."""
    whole = Tape(backend, seq_row=1, first_slot=0)
    expected = whole.feed(PROMPT, shape=256)
    chunked = Tape(backend, seq_row=2, first_slot=200)
    parts = []
    for chunk in (1, 3, 16, 60, 70):
        part = PROMPT[len(chunked.token_ids) :][:chunk]
        parts.append(chunked.feed(part, shape=min(m for m in family if m >= len(part))))
    assert np.array_equal(np.concatenate(parts), expected)
    bits = [kv_bits(backend, 0, [t.slot(p) for p in range(len(PROMPT))]) for t in (whole, chunked)]
    assert bits[0] == bits[1]


def test_neighbours_and_index_do_not_matter(backend: Backend, family: tuple[int, ...]) -> None:
    """The same row among other sequences, at every index of the pass, gives the same bits."""
    probe = Tape(backend, seq_row=1, first_slot=0)
    probe.feed(PROMPT[:20], shape=64)
    others = [Tape(backend, seq_row=2 + i, first_slot=100 + 60 * i) for i in range(3)]
    for i, other in enumerate(others):
        other.feed(PROMPT[i : i + 17 + i], shape=64)
    results = set()
    for index in range(8):
        rows, updates = RowsBuilder(), []
        for before in range(index):
            other = replace(others[before % 3], token_ids=list(others[before % 3].token_ids))
            updates.append(other.add_prompt_rows(rows, [int(RNG.integers(16))])[1])
        added, update = replace(probe, token_ids=list(probe.token_ids)).add_prompt_rows(rows, [3])
        updates.append(update)
        results.add(run_logprobs(probe, rows, added, joined(*updates), 8).tobytes())
    for shape in family:
        rows = RowsBuilder()
        added, update = replace(probe, token_ids=list(probe.token_ids)).add_prompt_rows(rows, [3])
        results.add(run_logprobs(probe, rows, added, update, shape).tobytes())
    assert len(results) == 1


def random_tree(num_nodes: int, rng: np.random.Generator) -> Draft:
    parents = tuple(int(rng.integers(NO_PARENT, i)) if i else NO_PARENT for i in range(num_nodes))
    return Draft(tuple(int(t) for t in rng.integers(0, 16, num_nodes)), parents)


@pytest.mark.parametrize("shape_of_tree", ["chain", "star", "binary", "random", "deep-random"])
def test_tree_rows_equal_plain_decoding(backend: Backend, shape_of_tree: str) -> None:
    """Every node's log-probabilities equal those of its path decoded token by token, K/V included."""
    rng = np.random.default_rng(3)
    draft = {
        "chain": Draft.chain([3, 1, 4, 1, 5, 9]),
        "star": Draft((3, 1, 4, 1), (NO_PARENT,) * 4),
        "binary": Draft((1, 2, 3, 4, 5, 6), (NO_PARENT, NO_PARENT, 0, 0, 1, 1)),
        "random": random_tree(12, rng),
        "deep-random": Draft.chain(rng.integers(0, 16, 30).tolist()),
    }[shape_of_tree]
    prompt = PROMPT[:122]  # so that paths cross a tile border
    tape = Tape(backend, seq_row=1, first_slot=0)
    tape.feed(prompt, shape=256)
    rows = RowsBuilder()
    node_rows = tape.add_draft_rows(rows, draft, scratch=300)
    found = run_logprobs(tape, rows, node_rows, NO_UPDATE, 64)
    plain = Tape(backend, seq_row=2, first_slot=400)
    plain.feed(prompt, shape=256)
    for leaf in set(range(len(draft))).difference(draft.parents):
        path = draft.path_to(leaf)
        decoded = replace(plain, token_ids=list(prompt))
        for node in path:
            expected = decoded.feed([draft.token_ids[node]], shape=4)
            assert np.array_equal(found[node], expected[-1]), (node, path)
        slots = [NUM_RESERVED + 300 + i for i in path]
        path_slots = [plain.slot(len(prompt) + i) for i in range(len(path))]
        assert kv_bits(backend, 0, slots) == kv_bits(backend, 0, path_slots)


def test_a_tree_row_does_not_see_its_sibling(backend: Backend) -> None:
    """Changing a sibling's token changes nothing for the others: the control changes an ancestor, which must show."""
    tape = Tape(backend, seq_row=1, first_slot=0)
    tape.feed(PROMPT[:10], shape=16)
    results = {}
    for name, tokens in {"base": (1, 2, 3), "sibling": (1, 9, 3), "ancestor": (8, 2, 3)}.items():
        rows = RowsBuilder()
        nodes = tape.add_draft_rows(rows, Draft(tokens, (NO_PARENT, NO_PARENT, 0)), scratch=300)
        results[name] = run_logprobs(tape, rows, nodes[2:], NO_UPDATE, 4)
    assert np.array_equal(results["base"], results["sibling"])
    assert not np.array_equal(results["base"], results["ancestor"])


def test_views(backend: Backend) -> None:
    """A skipped sub-layer changes results and leaves the full model's later passes alone."""
    tape = Tape(backend, seq_row=1, first_slot=0)
    expected = tape.feed(PROMPT[:20], shape=64)
    skipping = View.without({0}, {1})
    draft_tape = replace(tape, view=skipping, token_ids=list(tape.token_ids))
    rows = RowsBuilder()
    nodes = draft_tape.add_draft_rows(rows, Draft.chain([1, 2, 3]), scratch=300)
    drafted = run_logprobs(draft_tape, rows, nodes, NO_UPDATE, 4)
    rows = RowsBuilder()
    nodes = tape.add_draft_rows(rows, Draft.chain([1, 2, 3]), scratch=300)
    verified = run_logprobs(tape, rows, nodes, NO_UPDATE, 4)
    assert not np.array_equal(drafted, verified)
    plain = Tape(backend, seq_row=2, first_slot=100)
    assert np.array_equal(plain.feed(PROMPT[:20], shape=64), expected)
    assert np.array_equal(plain.feed([1, 2, 3], shape=4), verified)
    nothing_skipped = replace(tape, view=View(), token_ids=list(tape.token_ids))
    rows = RowsBuilder()
    nodes = nothing_skipped.add_draft_rows(rows, Draft.chain([1, 2, 3]), scratch=310)
    assert np.array_equal(run_logprobs(nothing_skipped, rows, nodes, NO_UPDATE, 4), verified)


def test_stores_share_slot_ids_and_nothing_else(backend: Backend) -> None:
    """Two models write K/V under the same slot ids without touching each other's."""
    first = Tape(backend, seq_row=1, first_slot=0)
    expected = first.feed(PROMPT[:20], shape=64)
    slots = [first.slot(p) for p in range(20)]
    before = kv_bits(backend, 0, slots)
    second = Tape(backend, seq_row=1, first_slot=0, store=1)
    other = second.feed(PROMPT[:20], shape=64)
    assert not np.array_equal(other, expected)
    assert kv_bits(backend, 0, slots) == before
    assert kv_bits(backend, 1, slots) != before


def test_recycled_rows_and_slots_keep_nothing(backend: Backend) -> None:
    """A table row and slots that another sequence used give the same bits as fresh ones."""
    fresh = Tape(backend, seq_row=1, first_slot=0).feed(PROMPT[:9], shape=16)
    Tape(backend, seq_row=2, first_slot=20).feed(PROMPT[50:80], shape=64)
    recycled = Tape(backend, seq_row=2, first_slot=20).feed(PROMPT[:9], shape=16)
    assert np.array_equal(fresh, recycled)


def test_wanted_results_agree(backend: Backend) -> None:
    """Draw, given log-probabilities, top-k, noisy top-k and the distribution describe the same logits."""
    tape = Tape(backend, seq_row=1, first_slot=0)
    rows = RowsBuilder()
    added, update = tape.add_prompt_rows(rows, PROMPT[:12])
    vocab_size = backend.limits.vocab_size
    ask = np.array(added[3:9], np.int32)
    bind(backend, 1, SamplingParams(temperature=0.8, top_k=5))
    given = np.arange(len(ask), dtype=np.int32)
    wanted = Wanted(
        draw=DrawWanted(ask),
        logprobs=LogprobsWanted(ask, given),
        top_k=TopKWanted(ask, vocab_size),
        noisy_top_k=NoisyTopKWanted(ask, 7),
        distribution=DistributionWanted(ask),
    )
    result = run(tape, rows, wanted, update, 16)
    assert result.draw is not None
    assert result.top_k is not None
    assert result.noisy_top_k is not None
    assert result.distribution is not None
    assert result.logprobs is not None
    by_id = np.empty_like(result.top_k.values)
    np.put_along_axis(by_id, result.top_k.token_ids, result.top_k.values, axis=-1)
    every = np.arange(len(ask))
    assert np.array_equal(result.logprobs, by_id[every, given])
    assert np.array_equal(result.draw.logprobs, by_id[every, result.draw.token_ids])
    assert np.array_equal(result.draw.token_ids, result.noisy_top_k.token_ids[:, 0])
    assert (result.noisy_top_k.token_ids[:, 5:] == NO_TOKEN).all()  # top_k = 5 leaves no sixth child
    assert (np.diff(result.noisy_top_k.values[:, :5], axis=-1) <= 0).all()
    probabilities = result.distribution.probabilities()
    children = np.take_along_axis(probabilities, result.noisy_top_k.token_ids[:, :5], axis=-1)
    assert np.allclose(np.exp(result.noisy_top_k.logprobs[:, :5]), children, rtol=1e-5)
    assert probabilities.shape == (len(ask), vocab_size)
    assert ((probabilities > 0).sum(axis=-1) == 5).all()
    assert np.allclose(probabilities.sum(axis=-1), 1, atol=1e-6)
    assert (np.diff(result.top_k.values, axis=-1) <= 0).all()


@pytest.mark.parametrize(("temperature", "stream"), [(0.0, 0), (1.0, 0), (0.7, 2 + 256 * 3)])
def test_children_are_those_of_the_shared_code(backend: Backend, temperature: float, stream: int) -> None:
    """Noisy top-k at T = 0 and in a drafter's own stream, against `draw.noisy_top_k` on the same logits."""
    tape = Tape(backend, seq_row=1, first_slot=0)
    rows = RowsBuilder()
    added, update = tape.add_prompt_rows(rows, PROMPT[:6])
    ask, vocab_size = np.array(added, np.int32), backend.limits.vocab_size
    params = SamplingParams(temperature=temperature)
    bind(backend, 1, params, seed=3)
    sampling = replace(plain_rows(params, SampleKey(3, 0), ask + 1), stream=np.full(len(ask), stream))
    noise = Noise(sampling.t, sampling.stream) if stream else None
    wanted = Wanted(top_k=TopKWanted(ask, vocab_size), noisy_top_k=NoisyTopKWanted(ask, 4, noise))
    result = run(tape, rows, wanted, update, 8)
    assert result.top_k is not None
    assert result.noisy_top_k is not None
    logits = np.empty_like(result.top_k.values)
    np.put_along_axis(logits, result.top_k.token_ids, result.top_k.values, axis=-1)
    expected = draw.noisy_top_k(np, logits, sampling, 4)
    assert np.array_equal(result.noisy_top_k.token_ids, expected.token_ids)
    assert np.allclose(result.noisy_top_k.values, expected.values, atol=1e-4)
    assert np.allclose(result.noisy_top_k.logprobs, expected.logprobs, atol=1e-4)
    others = draw.noisy_top_k(np, logits, replace(sampling, stream=sampling.stream + 1), 4)
    assert np.array_equal(expected.token_ids, others.token_ids) == (temperature == 0)


def test_a_distribution_lives_until_it_is_released(backend: Backend) -> None:
    tape = Tape(backend, seq_row=1, first_slot=0)
    rows = RowsBuilder()
    added, update = tape.add_prompt_rows(rows, [1, 2])
    ask = np.array(added, np.int32)
    bind(backend, 1, SamplingParams(temperature=1.0))
    handle = run(tape, rows, Wanted(distribution=DistributionWanted(ask)), update, 4).distribution
    assert handle is not None
    before = np.array(handle.probabilities())
    tape.feed([3], shape=4)
    assert np.array_equal(handle.probabilities(), before)
    first = np.arange(len(ask))
    raw = handle.logprobs(first, first)
    assert np.allclose(raw, np.log(before[first, first]), atol=1e-4)
    handle.release()
    handle.release()
    for use in (handle.probabilities, lambda: handle.logprobs(first, first)):
        with pytest.raises(StaleHandleError):
            use()


def test_results_are_stable(backend: Backend) -> None:
    """A ticket gives the same result every time, and a pass can be repeated with equal bits."""
    tape = Tape(backend, seq_row=1, first_slot=0)
    rows = RowsBuilder()
    added, update = tape.add_prompt_rows(rows, PROMPT[:5])
    wanted = Wanted(logprobs=LogprobsWanted(np.array(added, np.int32), np.zeros(5, np.int32)))
    pass_ = Pass(PassKind.CANONICAL, rows.build(8), wanted, update, head_shape=8)
    ticket = backend.submit(pass_)
    first, again = ticket.result().logprobs, ticket.result().logprobs
    repeated = backend.submit(pass_).result().logprobs
    assert first is again
    assert first is not None
    assert repeated is not None
    assert np.array_equal(first, repeated)


def test_fast_passes_differ_in_bits(backend: Backend) -> None:
    """The control: decoding in shape 1 gives other bits than the family, or equality tests would have no power.

    The native kernels are pure at every shape: there the control is a sabotaged kernel, in test_native_kernels.py.
    """
    canonical = Tape(backend, seq_row=1, first_slot=0)
    fast = Tape(backend, seq_row=2, first_slot=100, kind=PassKind.FAST)
    expected = np.concatenate([canonical.feed([t], shape=4) for t in PROMPT[:20]])
    found = np.concatenate([fast.feed([t], shape=1) for t in PROMPT[:20]])
    assert np.array_equal(expected, found) == isinstance(backend, NativeBackend)
    if isinstance(backend, NumpyBackend):
        assert np.allclose(expected, found, atol=1e-4)


BAD_CHANGES: dict[str, dict[str, object]] = {
    "token id": {"token_ids": np.array([99999], np.int32)},
    "negative token": {"token_ids": np.array([-2], np.int32)},
    "position": {"positions": np.array([99999], np.int32)},
    "slot": {"slots": np.array([NUM_SLOTS + NUM_RESERVED], np.int32)},
    "zero slot written": {"slots": np.array([0], np.int32)},
    "table row": {"seq_rows": np.array([9], np.int32)},
    "prefix": {"prefix_lens": np.array([2], np.int32)},
    "tail": {"tails": np.array([[-5]], np.int32)},
    "deep tail": {"tails": np.zeros((1, 33), np.int32)},
    "ragged": {"positions": np.array([0, 0], np.int32)},
}


@pytest.mark.parametrize("case", list(BAD_CHANGES))
def test_bad_arrays_raise(backend: Backend, case: str) -> None:
    rows = RowsBuilder()
    _, update = Tape(backend, seq_row=1, first_slot=0).add_prompt_rows(rows, [1])
    good = rows.build(1)
    bad = replace(good, **BAD_CHANGES[case])  # type: ignore[arg-type]
    with pytest.raises(InputError):
        backend.submit(Pass(PassKind.FAST, bad, Wanted(), update, head_shape=0))
    backend.submit(Pass(PassKind.FAST, good, Wanted(), update, head_shape=0))
