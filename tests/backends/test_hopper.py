"""A GPU's arithmetic on a CPU: equal to the numpy model of it bit for bit, and to the digests made on an H200."""

from __future__ import annotations

import ctypes
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.backends.test_conformance import PROMPT, hopper_backend
from tests.support.native import ISAS, on
from tests.support.product_cases import KINDS, values
from tests.support.skipping import skip_setup
from tests.support.tiny_llm import loaded, write_model
from verispec.backends import hopper_answers
from verispec.backends import native_library as native
from verispec.backends.cuda import bits, tiny
from verispec.backends.cuda.bit_model import Context, attention
from verispec.backends.cuda.shapes import num_parts
from verispec.backends.native_model import pack
from verispec.config import EngineConfig
from verispec.engine import Engine, Request
from verispec.errors import DeterminismError
from verispec.model.blocks import StoredTensor
from verispec.spec.registry import DRAFTER_NAMES, make_drafters
from verispec.spec.speculation import Speculation
from verispec.types import SamplingParams

pytestmark = pytest.mark.usefixtures("native_kernels")

HOPPER = native.ARITHMETICS.index("hopper-1")


def product(x: np.ndarray, w: np.ndarray, isa: str = "", threads: int = 1) -> np.ndarray:
    kernels = native.Kernels(threads, isa)
    packed = pack(StoredTensor("BF16", bits.bf16_bits(w).view(np.uint8)), kernels)
    matrix = native.Matrix(**{name: getattr(packed, name) for name, _ in native.Matrix._fields_})
    y = np.full((len(x), len(w)), 7, np.float32)
    kernels.call("vs_linear", HOPPER, matrix, np.ascontiguousarray(x), len(x), y)
    return y


def expected_product(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return bits.product(x, w, num_parts(len(w), x.shape[1]))


def assert_same_bits(found: np.ndarray, expected: np.ndarray) -> None:
    """Any NaN equals any other."""
    np.testing.assert_array_equal(np.where(np.isnan(found), 0, found.view(np.uint32)),
                                  np.where(np.isnan(expected), 0, expected.view(np.uint32)))  # fmt: skip
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))


@given(
    st.sampled_from(ISAS), st.sampled_from(KINDS), st.sampled_from(KINDS[:-1]), st.integers(1, 9), st.integers(1, 40),
    st.sampled_from([1, 15, 16, 17, 33, 64, 128, 144, 192, 256, 384]), st.integers(0, 2**32),
)  # fmt: skip
def test_products_are_those_of_the_numpy_model(
    isa: str, kind: str, weight_kind: str, num_rows: int, num_out: int, num_in: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    x, w = values(rng, kind, (num_rows, num_in)), values(rng, weight_kind, (num_out, num_in))
    assert_same_bits(product(x, w, isa, threads=1 + seed % 3), expected_product(x, w))


def test_the_largest_sums_are_exact() -> None:
    """Sixteen largest products of one sign nearly fill 32 bits: beside the accumulator they would not fit."""
    for sign in (1, -1):
        x, w = np.full((1, 64), 255, np.float32), np.full((3, 64), sign * 255, np.float32)
        assert_same_bits(product(x, w), expected_product(x, w))


def test_control_another_rounding_rule_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    x, w = values(rng, "wide", (4, 128)), values(rng, "wide", (32, 128))
    assert_same_bits(product(x, w), expected_product(x, w))
    monkeypatch.setattr(bits, "_FRACTION_BITS", 24)
    assert (product(x, w) != expected_product(x, w)).any()
    monkeypatch.undo()
    monkeypatch.setattr(bits, "_towards_zero", lambda total: total.astype(np.float32))
    assert (product(x, w) != expected_product(x, w)).any()


@pytest.mark.parametrize("isa", ISAS)
def test_the_activation_is_that_of_the_numpy_model(isa: str) -> None:
    rng = np.random.default_rng(1)
    gate_up = np.concatenate([values(rng, kind, (2, 240)) for kind in ("plain", "wide", "tiny", "huge", "not finite")])
    found = np.empty((len(gate_up), 120), np.float32)
    for which, activation in enumerate((bits.silu, bits.gelu)):
        native.Kernels(2, isa).call("vs_activate", HOPPER, which, gate_up, len(gate_up), 120, found)
        with np.errstate(all="ignore"):
            expected = bits.bf16(activation(gate_up[:, :120]) * gate_up[:, 120:])
        assert_same_bits(found, expected)


@given(
    st.sampled_from(ISAS), st.sampled_from([(1, 1), (2, 3), (3, 1), (1, 5)]), st.sampled_from([8, 16, 24, 64]),
    st.lists(st.sampled_from([1, 2, 63, 64, 65, 255, 256, 257, 300, 520]), min_size=1, max_size=3),
    st.sampled_from([0, 1, 40, 64, 270]), st.sampled_from(["plain", "wide", "zeros"]), st.integers(0, 2**32),
)  # fmt: skip
def test_attention_is_that_of_the_numpy_model(
    isa: str, heads: tuple[int, int], d: int, lens: list[int], window: int, kind: str, seed: int
) -> None:
    rng, (kv_heads, group), num_slots = np.random.default_rng(seed), heads, 530
    q = values(rng, kind, (len(lens), kv_heads * group, d))
    stride = -(-d // 16) * 16
    k, v = (values(rng, kind, (num_slots, kv_heads, d)) for _ in range(2))
    table = rng.permuted(np.tile(np.arange(num_slots, dtype=np.int32), (len(lens), 1)), axis=1)
    stores = [np.zeros((1, num_slots, kv_heads, stride), np.uint16) for _ in range(2)]
    for store, part in zip(stores, (k, v), strict=True):
        store[0, :, :, :d] = bits.bf16_bits(part)
    tail_lens = np.array([min(n, i) for i, n in enumerate(lens)], np.int32)
    tails = np.zeros((len(lens), 3), np.int32)
    for i, (n, count) in enumerate(zip(lens, tail_lens, strict=True)):
        tails[i, :count] = table[i, n - count : n]
    columns = {
        "token_ids": np.zeros(len(lens), np.int32), "positions": np.array(lens, np.int32) - 1,
        "slots": np.zeros(len(lens), np.int32), "seq_rows": np.arange(len(lens), dtype=np.int32),
        "prefix_lens": np.array(lens, np.int32) - tail_lens, "tails": tails, "tail_lens": tail_lens, "table": table,
    }  # fmt: skip
    rows = native.RowArrays(num_rows=len(lens), tail_width=3, table_width=num_slots,
                            **columns)  # fmt: skip
    layer = native.Layer(query_scalar=d, window=window)
    model = native.Model(
        arithmetic=HOPPER, num_layers=1, hidden=16, num_heads=kv_heads * group, num_kv_heads=kv_heads, head_dim=d,
        mlp=16, vocab=16, layers=ctypes.pointer(layer),
    )  # fmt: skip
    store = native.Store(k=stores[0], v=stores[1], slots_per_layer=num_slots)
    found = np.empty((len(lens), kv_heads * group, d), np.float32)
    native.Kernels(1 + seed % 2, isa).call("vs_attend", model, rows, store, 0, np.ascontiguousarray(q), found)
    context = Context(table.astype(np.int64), np.array(lens))
    with np.errstate(all="ignore"):
        assert_same_bits(found, attention(q, k, v, context, window=window or 1 << 30))


@pytest.mark.parametrize(("isa", "threads"), [(isa, 1 + i) for i, isa in enumerate(ISAS)])
def test_whole_models_have_the_digests_made_on_an_h200(isa: str, threads: int) -> None:
    goldens = json.loads(tiny.GOLDENS.read_text())
    for name in tiny.ARCHITECTURES:
        for i, steps in enumerate(hopper_answers.steps(name, on(isa, threads))):
            assert len(steps) == 1 + tiny.ARCHITECTURES[name].num_layers
            assert {step: tiny.digest(found) for step, found in steps.items()} == {
                step: goldens[name][f"{i}/{step}"] for step in steps
            }, (name, i)
    assert hopper_answers.wrong_answers(on(isa, threads)) == ()


def test_control_one_bit_less_gives_wrong_answers_and_serves_no_promise(
    tmp_path: Path, sabotaged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "PATH", sabotaged)
    expected = [f"{name}, pass {i}" for name in tiny.ARCHITECTURES for i in range(2)]
    assert hopper_answers.wrong_answers(on("", 2)) == tuple(expected)
    with (
        loaded(write_model(tmp_path / "tiny.gguf"), tmp_path / "cache", backend="hopper") as llm,
        pytest.raises(DeterminismError, match="known-answer test"),
    ):
        llm.generate("one two", SamplingParams(max_tokens=3))


REQUESTS = (
    {}, {"temperature": 1.0, "seed": 5}, {"temperature": 0.8, "top_p": 0.7, "seed": 6, "n": 2},
    {"temperature": 1.0, "repetition_penalty": 1.2, "seed": 8}, {"logprobs": 2, "prompt_logprobs": 1},
)  # fmt: skip
WAYS = {
    "batch": {"max_burst": 1}, "bursts": {"max_burst": 6}, "preemption": {"num_slots": 60, "prefix_cache": False},
    "chunks": {"row_budget": 5}, "suffix": {}, "decode": {}, "skip": {},
}  # fmt: skip


def test_the_engine_gives_the_same_whatever_runs_beside() -> None:
    backend = hopper_backend("llama")
    requests = [
        Request(PROMPT[3 * i :][: 9 + 5 * i], SamplingParams(max_tokens=14, **more), eos_ids=(3,))
        for i, more in enumerate(REQUESTS)
    ]

    def digests(chosen: list[Request], method: str = "none", **changes: object) -> list[str]:
        config = EngineConfig(**{"num_slots": 300, "max_running": 8, "max_draft": 4, **changes})
        drafters = make_drafters(skip_setup(backend, draft_len=4))
        engine = Engine(backend, family=backend.shapes, drafters=drafters, config=config)
        ids = [engine.add(replace(request, speculation=Speculation(method))) for request in chosen]
        found: dict[tuple[int, int], str] = {}
        while engine.has_work:
            for event in engine.step():
                if event.output is not None:
                    found[event.request_id, event.sample_index] = event.output.digest
        return [found[i, n] for i, request in zip(ids, chosen, strict=True) for n in range(request.params.n)]

    alone = [digest for request in requests for digest in digests([request], max_burst=1, prefix_cache=False)]
    assert len(set(alone)) == len(alone)
    for name, changes in WAYS.items():
        assert digests(requests, name if name in DRAFTER_NAMES else "none", **changes) == alone, name
    # The control: another seed.
    assert digests([replace(r, params=replace(r.params, seed=99)) for r in requests]) != alone
