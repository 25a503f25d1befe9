"""A CPU derives the bits of a GPU: golden digests made on an H200 by `device_check.py`, and the pieces of the model."""

import json
from fractions import Fraction

import numpy as np
import pytest

from tests.backends.cuda import case_digests
from verispec.backends.cuda import bits, tiny
from verispec.backends.cuda.shapes import num_parts

GOLDENS = json.loads(tiny.GOLDENS.read_text())


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_bit_model_derives_the_digests_made_on_an_h200(name: str) -> None:
    steps = tiny.bit_model_steps(tiny.tiny_model(name))
    derived = {f"{i}/{step}": tiny.digest(values) for i, one in enumerate(steps) for step, values in one.items()}
    assert derived == GOLDENS[name]


def test_digests_of_a_wide_product_and_of_draws_are_derived() -> None:
    """`device_check.py` finds the same on a GPU."""
    assert case_digests.derived() == case_digests.DIGESTS


def test_another_accumulator_width_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    # The control: one bit less, as on earlier hardware, and the digests are others.
    monkeypatch.setattr(bits, "_FRACTION_BITS", 24)
    steps = tiny.bit_model_steps(tiny.tiny_model("llama"))
    differing = [k for k, v in steps[0].items() if tiny.digest(v) != GOLDENS["llama"][f"0/{k}"]]
    assert "logits" in differing
    assert case_digests.derived()["wide product"] != case_digests.DIGESTS["wide product"]


def test_fused_rounds_once() -> None:
    values = tiny.numbers("fused", (3, 2000))
    values[2] *= np.float32(2) ** ((np.arange(2000) % 60) - 30)
    for (a, b, c), got in zip(values.T, bits.fused(*values), strict=True):
        exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
        neighbours = (np.nextafter(got, np.float32(-np.inf)), np.nextafter(got, np.float32(np.inf)))
        assert abs(Fraction(float(got)) - exact) <= min(abs(Fraction(float(n)) - exact) for n in neighbours)


def test_gelu_is_that_of_the_tanh() -> None:
    x = np.linspace(-12, 12, 100_001, dtype=np.float32)
    exact = x.astype(np.float64)
    exact = 0.5 * exact * (1 + np.tanh(np.sqrt(2 / np.pi) * (exact + 0.044715 * exact**3)))
    assert np.abs(bits.gelu(x) - exact).max() < 1e-6
    assert np.abs(bits.silu(x) - exact).max() > 0.1  # the control
    with np.errstate(all="ignore"):
        assert bits.gelu(np.array([0, 1e30], np.float32)).tolist() == [0, np.float32(1e30)]


def test_exp2_is_close_and_clipped() -> None:
    x = np.linspace(-126, 126, 100_001, dtype=np.float32)
    assert np.max(np.abs(bits.exp2(x) / np.exp2(x.astype(np.float64)) - 1)) < 2e-7
    edges = bits.exp2(np.array([-np.inf, -127, 0, 126, 200], np.float32))
    assert edges.tolist() == [0.0, 0.0, 1.0, 2.0**126, 2.0**126]


def test_one_step_is_one_sum_cut_off_25_bits_below_the_largest_term() -> None:
    small = np.float32(2.0**-13)  # its square is 2^-26: below the cut beside 1, though sixteen of them are not
    together = np.array([[1] + [small] * 15], np.float32)
    assert bits.chain(together, together)[0, 0] == 1.0
    before = np.array([[small] * 16 + [1]], np.float32)
    assert bits.chain(before, before)[0, 0] == 1.0 + 2.0**-22


# bf16 words of both operands, and what an H200 gave: subnormal sums, overflow, underflow, and just below the largest.
OF_AN_H200 = [
    ((0x23DA, 0x11B7, 0x1F09), (0x17A2, 0x1554, 0x905F), 0x000044FA),
    ((0x23DA, 0x11B7, 0x1F09), (0x05B6, 0x1D82, 0x9C48), 0x80003584),
    ((0x0C3B, 0xA4AD, 0x1A44), (0x9DA9, 0x8A51, 0x9F70), 0x800005BE),
    ((0x907C, 0x0744, 0x9920), (0x1E29, 0x0035, 0xA124), 0x00000CD0),
    ((0x1A29, 0x2554), (0x1427, 0x9512), 0x80000F1D),
    ((0xDE8B, 0x5E39, 0xDE0B), (0xE0B5, 0xDD84, 0xDFE8), 0x7F800000),
    ((0xDE8B, 0x5E39, 0xDE0B), (0x605F, 0xDD85, 0x5EAF), 0xFF800000),
    ((0x9748, 0xA06E), (0x8C15, 0x064B), 0x00000000),
    ((0x9748, 0xA06E), (0x8048, 0x84AC), 0x00000000),
    ((0xDF2E, 0x60A3), (0xDEC4, 0xDE46), 0xFF398800),
]


def _of_an_h200() -> list[bool]:
    found = []
    for left, right, expected in OF_AN_H200:
        a, b = ((np.array([words], np.uint32) << np.uint32(16)).view(np.float32) for words in (left, right))
        found.append(int(bits.chain(a, b).view(np.uint32)[0, 0]) == expected)
    return found


def test_sums_at_both_ends_of_the_exponents_are_those_of_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(_of_an_h200())
    monkeypatch.setattr(bits, "_LEAST_POWER", 2.0**-150)
    assert not all(_of_an_h200())


PARTS = [
    (960, 576, 3), (576, 576, 3), (3072, 576, 1), (576, 1536, 4),  # SmolLM2-135M
    (6144, 4096, 2), (4096, 4096, 2), (28672, 4096, 1), (4096, 14336, 2),  # Llama 8B
    (2048, 1536, 2), (1536, 1536, 2), (17920, 1536, 1), (1536, 8960, 4),  # Qwen2.5 1.5B
    (100, 144, 1),  # no multiple of 64
]  # fmt: skip


@pytest.mark.parametrize(("outputs", "columns", "parts"), PARTS)
def test_parts_of_k_follow_from_the_sizes_alone(outputs: int, columns: int, parts: int) -> None:
    assert num_parts(outputs, columns) == parts
