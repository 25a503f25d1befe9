"""The native kernels one by one: right against float64 and the shared sampling code, and the same bits everywhere.

"Everywhere" is what runs here: every instruction set of this build that the CPU has, the portable one always among
them, and several numbers of threads. The control is a library built with the order of blocks reversed for rows that are
computed together.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from tests.support.native import ISAS, smollm2_backend
from tests.support.sampling_rows import History, SamplingRowsBuilder
from verispec.backends import native_library as native
from verispec.backends.audit import audit
from verispec.backends.native_backend import NativeBackend, sampling_struct
from verispec.backends.native_model import pack
from verispec.backends.options import LoadedModel, NativeOptions
from verispec.errors import InputError, ModelFileError, UnsupportedModelError
from verispec.model.blocks import FORMATS, StoredTensor, to_float32
from verispec.model.elementary import power, sin_cos
from verispec.sampling import draw as shared
from verispec.sampling import weights
from verispec.sampling.noise import gumbel_f32
from verispec.sampling.rows import SampleKey, SamplingRows
from verispec.types import SamplingParams

pytestmark = pytest.mark.usefixtures("native_kernels")

EXACT_TYPES = ("F32", "F16", "BF16")
TYPES = (*EXACT_TYPES, "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
SHAPES = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 31, 64)


def stored(type_name: str, num_out: int, num_in: int, seed: int = 0) -> StoredTensor:
    """Random weights in the type's own blocks; the K types are made of random bytes with sensible scales."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((num_out, num_in)).astype(np.float32)
    if type_name in EXACT_TYPES:
        return stored_floats(type_name, values)
    fmt = FORMATS[type_name]
    if not type_name.endswith("_K"):
        return StoredTensor(type_name, quants.quantize(values, GGMLQuantizationType(fmt.type_id)))
    blocks = rng.integers(0, 256, (num_out, num_in // fmt.block_len, fmt.block_nbytes), dtype=np.uint8)
    scale = rng.uniform(0.001, 0.01, (*blocks.shape[:2], 2)).astype(np.float16).view(np.uint8)
    if type_name == "Q6_K":
        blocks[..., 208:210] = scale[..., :2]
    else:
        blocks[..., :4] = scale
    return StoredTensor(type_name, blocks.reshape(num_out, -1))


def stored_floats(type_name: str, values: np.ndarray) -> StoredTensor:
    if type_name == "BF16":
        return StoredTensor("BF16", (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8))
    return StoredTensor(type_name, values.astype(np.float16 if type_name == "F16" else np.float32).view(np.uint8))


class Product:
    """A packed matrix and a set of threads."""

    def __init__(self, tensor: StoredTensor, isa: str = "", threads: int = 1, path: Path | None = None) -> None:
        self.kernels = native.Kernels(threads, isa, path)
        self.packed = pack(tensor, self.kernels)
        self.matrix = native.Matrix(**{name: getattr(self.packed, name) for name, _ in native.Matrix._fields_})

    def __call__(self, x: np.ndarray) -> np.ndarray:
        y = np.full((len(x), self.packed.num_out), np.nan, np.float32)
        self.kernels.call("vs_linear", 0, self.matrix, np.ascontiguousarray(x, np.float32), len(x), y)
        return y


@pytest.mark.parametrize("type_name", TYPES)
def test_packing_changes_no_value(type_name: str) -> None:
    """Products with unit vectors give the weights back; 256 columns, as the K types need, and an odd number of rows."""
    tensor = stored(type_name, 37, 256)
    expected = to_float32(tensor.data, type_name)
    found = Product(tensor)(np.eye(256, dtype=np.float32)).T
    # One rounding of the scale, one of the product; for affine types one more of the sum.
    assert np.allclose(found, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("type_name", TYPES)
def test_products_are_right(type_name: str) -> None:
    tensor = stored(type_name, 50, 512)
    weights = to_float32(tensor.data, type_name).astype(np.float64)
    x = np.random.default_rng(1).standard_normal((9, 512)).astype(np.float32)
    x[:, 77] *= 100  # an outlier, as real activations have
    expected = x.astype(np.float64) @ weights.T
    rounding = 2e-6 * (np.abs(x).astype(np.float64) @ np.abs(weights).T)
    if type_name not in EXACT_TYPES:  # every value is off by at most half a step of its block, max|x| / 16256
        steps = np.abs(x.reshape(9, -1, 32)).max(axis=-1).astype(np.float64) / 16256
        rounding += steps / 2 @ np.abs(weights).reshape(50, -1, 32).sum(axis=-1).T
    assert (np.abs(Product(tensor)(x) - expected) <= rounding).all()


@pytest.mark.parametrize("type_name", TYPES)
def test_every_shape_instruction_set_and_thread_count_gives_the_same_bits(type_name: str) -> None:
    tensor = stored(type_name, 83, 512)
    x = np.random.default_rng(2).standard_normal((max(SHAPES), 512)).astype(np.float32)
    x[3] = 0.0
    x[5, 40] = 1e30
    x[6, 7] = 1e-38  # a block of denormal size
    expected = Product(tensor, "portable")(x)
    assert np.isfinite(expected).all()
    for isa, threads in itertools.product(ISAS, (1, 2, 3)):
        product = Product(tensor, isa, threads)
        for shape in SHAPES:
            assert product(x[:shape]).tobytes() == expected[:shape].tobytes(), (isa, threads, shape)
        assert product(x[::-1][:7]).tobytes() == expected[::-1][:7].tobytes()


@pytest.mark.parametrize("type_name", ["F32", "Q4_1", "Q8_0", "Q6_K"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_row(type_name: str, bad: float) -> None:
    tensor = stored(type_name, 33, 256)
    x = np.random.default_rng(3).standard_normal((6, 256)).astype(np.float32)
    expected = Product(tensor)(x)
    x[2, 100] = bad
    found = Product(tensor)(x)
    assert not np.isfinite(found[2]).any() or type_name == "F32"
    assert not np.isfinite(found[2]).all()
    others = [0, 1, 3, 4, 5]
    assert found[others].tobytes() == expected[others].tobytes()


def elementary(which: int, x: np.ndarray, isa: str = "") -> np.ndarray:
    y = np.empty(len(x), np.float32)
    native.Kernels(1, isa).call("vs_elementary", which, np.ascontiguousarray(x), len(x), y)
    return y


@pytest.mark.parametrize("isa", ISAS)
def test_elementary_functions_are_accurate(isa: str) -> None:
    x = np.linspace(-86, 86, 200_001).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(elementary(0, x, isa) - exact) / exact).max() < 2.5e-7
    assert elementary(0, np.array([-88, -1e30, -np.inf, 0.0], np.float32), isa).tolist() == [0, 0, 0, 1]
    assert np.isnan(elementary(0, np.array([np.nan], np.float32), isa)).all()
    y = np.exp(np.linspace(-80, 80, 100_001)).astype(np.float32)
    assert np.allclose(elementary(1, y, isa), np.log(y.astype(np.float64)), rtol=3e-7, atol=3e-7)


@pytest.mark.parametrize("isa", ISAS)
def test_the_noise_is_the_shared_noise_bit_for_bit(isa: str) -> None:
    words = np.random.default_rng(4).integers(0, 2**32, 100_000, dtype=np.uint32)
    words[:4] = 0, 1, 2**32 - 1, 2**31
    expected = gumbel_f32(np, words.astype(np.int64))
    assert elementary(2, words.view(np.float32), isa).tobytes() == expected.tobytes()


@pytest.mark.parametrize("isa", ISAS)
def test_half_precision_is_rounded_as_ieee_says(isa: str) -> None:
    halves = np.arange(65536, dtype=np.uint16).view(np.float16)
    halves = halves[np.isfinite(halves)].astype(np.float32)
    between = np.random.default_rng(5).uniform(-70000, 70000, 200_000).astype(np.float32)
    tiny = np.random.default_rng(6).uniform(-1e-4, 1e-4, 200_000).astype(np.float32)
    ties = halves[:-1] + np.diff(halves) / 2
    x = np.concatenate([halves, between, tiny, ties])
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16).astype(np.float32)
    assert elementary(3, x, isa).tobytes() == expected.tobytes()


def test_tables_are_accurate() -> None:
    x = np.concatenate([np.linspace(0, 10, 10_001), np.arange(0, 200_000, 7) * 0.9371])
    sine, cosine = sin_cos(x)
    assert np.abs(sine - np.sin(x)).max() < 1e-14
    assert np.abs(cosine - np.cos(x)).max() < 1e-14
    assert all(abs(power(b, e) / b**e - 1) < 1e-14 for b in (1e4, 1e5, 5e5, 1e6) for e in np.linspace(0, 1, 33))


def rows_of(params: list[SamplingParams], vocab_size: int) -> SamplingRows:
    builder = SamplingRowsBuilder()
    for i, p in enumerate(params):
        history = History(frozenset({1, 2}), {3: 2, 4: 1}, 3)
        builder.add(
            p, SampleKey(p.seed or 0, i % 3), t=10 + i, history=history, path_ids=(), stopping_ids=(),
            vocab_size=vocab_size,
        )  # fmt: skip
    return builder.build()


def draw_native(logits: np.ndarray, rows: SamplingRows, isa: str, threads: int = 2) -> list[np.ndarray]:
    """Token ids and log-probabilities; the ids, values and log-probabilities of four noisy children; totals."""
    kernels = native.Kernels(threads, isa)
    (num_rows, vocab_size), k = logits.shape, min(4, logits.shape[1])
    at, totals = np.arange(num_rows, dtype=np.int32), np.empty((num_rows, 2), np.float32)
    kernels.call("vs_totals", logits, num_rows, vocab_size, totals)
    struct = sampling_struct(rows)
    token_ids, logprobs = np.empty(num_rows, np.int64), np.empty(num_rows, np.float32)
    kernels.call("vs_draw", logits, at, totals, vocab_size, struct, token_ids, logprobs)
    ids, values, log_p = np.empty((num_rows, k), np.int64), *np.empty((2, num_rows, k), np.float32)
    kernels.call("vs_noisy_top_k", logits, at, vocab_size, struct, k, ids, values, log_p)
    return [token_ids, logprobs, ids, values, log_p, totals]


def draw_shared(logits: np.ndarray, rows: SamplingRows) -> list[np.ndarray]:
    with np.errstate(over="ignore"):  # a tiny temperature
        noisy = shared.noisy_top_k(np, logits, rows, min(4, logits.shape[1]))
        return [*shared.draw(np, logits, rows), *noisy, np.stack(weights.totals(np, logits), axis=-1)]


def many_params(count: int) -> list[SamplingParams]:
    rng = np.random.default_rng(7)
    choices = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 7},
        {"temperature": 1.0, "min_p": 0.05},
        {"temperature": 0.9, "top_p": 0.5, "top_k": 40, "min_p": 0.01},
        {"temperature": 2.0, "logit_bias": ((3, 5.0), (9, -3.0))},
        {"temperature": 1.0, "top_p": 0.999},
        {"temperature": 1.0, "repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": -0.3},
        {"temperature": 1e-6, "top_p": 0.9},
        {"temperature": 1.0, "top_p": 1e-9, "min_p": 1.0},
        {"repetition_penalty": 1.4, "logit_bias": ((3, 5.0), (4, -1.0))},
    ]
    return [SamplingParams(seed=int(rng.integers(2**63)), **choices[i % len(choices)]) for i in range(count)]  # type: ignore[arg-type]


def adversarial_rows(vocab_size: int) -> np.ndarray:
    """Rows that a kernel may get wrong: ties, tails of weight 0, one token alone, nothing to draw, either NaN."""
    rng = np.random.default_rng(vocab_size)
    logits = (rng.standard_normal((16, vocab_size)) * 4).astype(np.float32)
    logits[0] = 1.0
    logits[1, : vocab_size // 2] = logits[1, 0]
    logits[2] = np.round(logits[2])
    logits[3] *= 1e-4
    logits[4, vocab_size // 3] += 40.0  # all others weigh nothing
    logits[5] = rng.uniform(-28.6, -28.2, vocab_size)  # around the border of weight 0
    logits[5, 0] = 0.0
    logits[6] = -np.inf
    logits[6, -1] = -3.0
    logits[7, ::3] = -np.inf
    logits[8] = np.where(rng.random(vocab_size) < 0.5, 0.0, -0.0)
    logits[9] *= 1e30
    logits[10, vocab_size // 2] = np.nan
    logits[11, -1] = np.array(0xFFC00000, np.uint32).view(np.float32)
    logits[12, 0] = np.inf
    logits[13] = -np.inf
    logits[14] = -300.0 + logits[14]
    return logits


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("has_masks", [False, True])
@pytest.mark.parametrize("vocab_size", [1, 5, 64, 1000, 49152])
def test_sampling_is_that_of_the_shared_code_bit_for_bit(isa: str, has_masks: bool, vocab_size: int) -> None:
    """Random and adversarial rows under every filter, and with masks: of all tokens, of half, of few, of none."""
    params = many_params(12 if vocab_size < 49152 else 11)
    if vocab_size < 10:
        params = [p for p in params if not p.logit_bias and not p.has_penalties]
    kinds = adversarial_rows(vocab_size)
    if vocab_size == 49152:
        kinds = kinds[[2, 5, 10, 15]]
    logits, params = np.repeat(kinds, len(params), axis=0), params * len(kinds)
    rows = rows_of(params, vocab_size)
    if has_masks:
        shares = np.random.default_rng(11).random((4, -(-vocab_size // 32) * 32))
        bits = np.packbits(shares < [[2], [0.5], [3 / vocab_size], [0]], axis=1, bitorder="little").view(np.uint32)
        rows = replace(rows, masks=np.arange(len(rows)) * 7 % 13 % 4, allowed=bits)
    for found, expected in zip(draw_native(logits, rows, isa), draw_shared(logits, rows), strict=True):
        np.testing.assert_array_equal(found, expected, strict=True)  # NaN equals NaN
        assert found[found == found].tobytes() == expected[expected == expected].tobytes()  # and the sign of 0 counts


def test_what_cannot_be_drawn_gives_no_token() -> None:
    logits = adversarial_rows(40)
    for temperature in (0.0, 1.0):
        rows = rows_of([SamplingParams(temperature=temperature, seed=1)] * len(logits), 40)
        token_ids, logprobs, *_ = draw_native(logits, rows, "portable")
        assert np.flatnonzero(token_ids < 0).tolist() == [10, 11, 12, 13]
        assert np.flatnonzero(np.isnan(logprobs)).tolist() == [10, 11, 12, 13]


def test_sampling_bits_are_the_same_on_every_instruction_set_and_thread_count() -> None:
    logits = (np.random.default_rng(8).standard_normal((24, 3001)) * 3).astype(np.float32)
    rows = rows_of(many_params(24), 3001)
    results = {
        b"".join(part.tobytes() for part in draw_native(logits, rows, isa, threads))
        for isa, threads in itertools.product(ISAS, (1, 2, 3))
    }
    assert len(results) == 1


@pytest.mark.parametrize("isa", ISAS)
def test_weights_are_those_of_the_shared_code_at_every_exponent(isa: str) -> None:
    """Single tokens below a best one: the total is 2^40 and one weight, to the last unit."""
    z = -np.exp(np.random.default_rng(10).uniform(-18, 5, 4096)).astype(np.float32)
    z[:3] = -28.41, -28.42, -28.43
    logits = np.stack([np.zeros_like(z), z], axis=-1)
    totals = np.empty((len(z), 2), np.float32)
    native.Kernels(1, isa).call("vs_totals", logits, len(z), 2, totals)
    assert totals.tobytes() == np.stack(weights.totals(np, logits), axis=-1).tobytes()


def test_control_reversed_blocks_are_noticed(sabotaged: Path) -> None:
    tensor = stored("Q4_1", 64, 512)
    x = np.random.default_rng(2).standard_normal((8, 512)).astype(np.float32)
    good, bad = Product(tensor, "portable"), Product(tensor, "portable", path=sabotaged)
    assert good(x).tobytes() == b"".join(good(row[None]).tobytes() for row in x)
    assert bad(x).tobytes() != b"".join(bad(row[None]).tobytes() for row in x)
    assert bad(x[:1]).tobytes() == good(x[:1]).tobytes()


def test_control_the_audit_refuses_the_sabotaged_library(
    smollm2_path: Path, sabotaged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "PATH", sabotaged)
    backend = smollm2_backend(smollm2_path)
    found = audit([p for p in backend.probes() if p.name in ("q", "norm")], shapes=(1, 2, 4))
    assert found.families == ((1,), (2, 4))
    backend.close()


def test_another_build_is_another_device_with_the_same_fingerprint(
    smollm2_path: Path, sabotaged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = smollm2_backend(smollm2_path)
    monkeypatch.setattr(native, "PATH", sabotaged)
    theirs = smollm2_backend(smollm2_path)
    assert ours.device()["build"] != theirs.device()["build"]
    assert {**ours.device(), "build": "", "isa": ""} == {**theirs.device(), "build": "", "isa": ""}
    assert ours.fingerprint() == theirs.fingerprint()
    ours.close()
    theirs.close()


def test_the_audit_finds_one_family_of_all_shapes(smollm2_path: Path) -> None:
    backend = smollm2_backend(smollm2_path)
    probes = [p for p in backend.probes() if p.name not in ("head", "draw", "logprob")]
    assert audit(probes, shapes=range(1, 33)).families == (tuple(range(1, 33)),)
    backend.close()


def test_a_type_without_a_kernel_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="no kernel for Q3_K"):
        pack(StoredTensor("Q3_K", np.zeros((16, 110), np.uint8)), native.Kernels(1))


def test_scales_that_are_not_finite_are_refused(smollm2_path: Path) -> None:
    from verispec.model import open_checkpoint

    with open_checkpoint(smollm2_path) as checkpoint:

        def spoilt(name: str) -> StoredTensor:
            found = checkpoint.stored(name)
            data = found.data.copy()
            data[0, :2] = np.array([np.nan], np.float16).view(np.uint8)
            return StoredTensor(found.type_name, data)

        model = LoadedModel(checkpoint.architecture, checkpoint.tensor, spoilt)
        with pytest.raises((InputError, ModelFileError), match="not finite"):
            NativeBackend([model], NativeOptions(num_slots=1, num_seq_rows=1))


@pytest.mark.parametrize("type_name", EXACT_TYPES)
@pytest.mark.parametrize("size", [1.0, 1e-7, 1e-30, 1e5])
def test_weights_become_q8_on_request_by_one_rule(type_name: str, size: float) -> None:
    """d is max|x| / 127 as float16, and the integers are x / d to the nearest; tiny blocks become zeros."""
    values = np.random.default_rng(9).standard_normal((40, 64)).astype(np.float32) * np.float32(size)
    values[3] = 0.0
    if type_name == "F16":
        values = np.clip(values, -60000, 60000).astype(np.float16).astype(np.float32)
    kept = stored_floats(type_name, values)
    blocks = to_float32(kept.data, type_name).reshape(40, 2, 32)
    scales = (np.abs(blocks).max(axis=-1) / np.float32(127)).astype(np.float16)
    wide = scales.astype(np.float32)[..., None]
    inverse = np.divide(np.float32(1), wide, out=np.zeros_like(wide), where=wide > 0)
    integers = np.clip(np.rint(blocks * inverse), -127, 127).astype(np.int8)
    by_rule = np.concatenate([scales[..., None].view(np.uint8), integers.view(np.uint8)], axis=-1).reshape(40, -1)
    kernels = native.Kernels(2)
    quantised, expected = pack(kept, kernels, quantises=True), pack(StoredTensor("Q8_0", by_rule), kernels)
    assert quantised.data.tobytes() == expected.data.tobytes()
    assert quantised[:3] == expected[:3]
    assert pack(kept, kernels)[:3] != expected[:3]


def test_rows_that_are_no_whole_blocks_stay_as_they_are() -> None:
    kept = stored("F32", 16, 40)
    assert pack(kept, native.Kernels(1), quantises=True)[:3] == (0, 16, 40)


@pytest.mark.parametrize("type_name", TYPES)
def test_threads_pack_the_same_bytes(type_name: str) -> None:
    tensor = stored(type_name, 83, 512)
    packed = {pack(tensor, native.Kernels(threads)).data.tobytes() for threads in (1, 2, 3, 7)}
    assert len(packed) == 1


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("quantises", [False, True])
def test_what_is_not_finite_is_seen_wherever_it_stands(type_name: str, quantises: bool) -> None:
    """A scale, or a float weight, of the last row and block; and none is seen where there is none."""
    tensor = stored(type_name, 83, 512)
    assert pack(tensor, native.Kernels(2), quantises=quantises).is_finite
    spoilt = tensor.data.copy()
    at, nan = {"Q6_K": -2, "F32": -4, "F16": -2, "BF16": -2}.get(type_name, -FORMATS[type_name].block_nbytes), np.nan
    bits = (
        np.array([nan], np.float32).view(np.uint8) if type_name == "F32" else np.array([nan], np.float16).view(np.uint8)
    )
    bits = np.array([0xC0, 0x7F], np.uint8) if type_name == "BF16" else bits
    spoilt[-1, len(spoilt[-1]) + at :][: len(bits)] = bits
    assert not pack(StoredTensor(type_name, spoilt), native.Kernels(2), quantises=quantises).is_finite


def test_bad_arguments_raise() -> None:
    with pytest.raises(InputError, match="no quantum kernels"):
        native.Kernels(1, "quantum")
    with pytest.raises(InputError, match="contiguous"):
        native.address(np.zeros((4, 4))[:, 1:])


def test_without_a_library_numpy_serves_and_one_line_says_what_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verispec.backends import select

    monkeypatch.setattr(native, "PATH", tmp_path / "missing.so")
    assert select.default_backend() == "numpy"
    assert "was not built" in str(select.what_is_lost("numpy"))
    with pytest.raises(InputError, match="backend native: the native backend is missing"):
        select.check_name("native")
    (tmp_path / "missing.so").write_bytes(b"not a library")
    assert "cannot be loaded" in str(select.what_is_lost("numpy"))
