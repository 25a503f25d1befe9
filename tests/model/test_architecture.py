import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tiny_models import TinyConfig, make_tensors
from verispec.errors import InputError
from verispec.model.architecture import (
    Architecture,
    FrequencyFactors,
    LayerSpec,
    LinearScaling,
    Llama3Scaling,
    Rope,
    expected_tensors,
    inverse_frequencies,
    make_layers,
)

LLAMA_31 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_len=8192)


def arch_with(**changes: object) -> Architecture:
    return dataclasses.replace(TinyConfig().architecture, **changes)


def layer_with(**changes: object) -> LayerSpec:
    return dataclasses.replace(TinyConfig().architecture.layers[0], **changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layers": ()}, "num_layers"),
        ({"layers": (layer_with(),) * 1025}, "num_layers"),
        ({"hidden_size": -64}, "hidden_size"),
        ({"vocab_size": 1 << 40}, "vocab_size"),
        ({"context_len": 0}, "context_len"),
        ({"num_kv_heads": 3}, "multiple"),
        ({"head_dim": 15}, "even"),
        ({"norm_eps": 0.0}, "norm_eps"),
        ({"norm_eps": math.nan}, "norm_eps"),
        ({"family": "gpt2"}, "gpt2"),
        ({"embed_scale": math.inf}, "embed_scale"),
        ({"layers": (layer_with(), layer_with(rope=Rope(1e4, FrequencyFactors((1.0,)))))}, "factors"),
    ],
)
def test_wrong_sizes_are_refused_by_name(changes: dict[str, object], named: str) -> None:
    with pytest.raises(InputError, match=named):
        arch_with(**changes)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Rope(0.0),
        lambda: Rope(math.inf),
        lambda: LinearScaling(0.0),
        lambda: FrequencyFactors((1.0, -1.0)),
        lambda: dataclasses.replace(LLAMA_31, factor=math.nan),
        lambda: dataclasses.replace(LLAMA_31, low_freq_factor=4.0),
        lambda: layer_with(window=0),
        lambda: layer_with(query_scalar=0.0),
    ],
)
def test_a_wrong_rope_or_layer_is_refused(make: object) -> None:
    with pytest.raises(InputError):
        make()  # type: ignore[operator]


def test_plain_frequencies_are_powers_of_theta() -> None:
    frequencies = inverse_frequencies(Rope(100000.0), 64)
    exact = 100000.0 ** (-np.arange(0, 64, 2) / 64)
    assert frequencies.dtype == np.float32
    assert frequencies[0] == 1
    np.testing.assert_allclose(frequencies, exact, rtol=2e-7)


def llama3_by_definition(plain: float, scaling: Llama3Scaling) -> float:
    wavelength = 2 * math.pi / plain
    if wavelength < scaling.original_context_len / scaling.high_freq_factor:
        return plain
    if wavelength > scaling.original_context_len / scaling.low_freq_factor:
        return plain / scaling.factor
    smooth = (scaling.original_context_len / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    return (1 - smooth) * plain / scaling.factor + smooth * plain


def test_llama3_scaling_follows_its_definition_in_all_three_bands() -> None:
    plain = 500000.0 ** (-np.arange(0, 128, 2) / 128)
    frequencies = inverse_frequencies(Rope(500000.0, LLAMA_31), 128)
    wanted = [llama3_by_definition(x, LLAMA_31) for x in plain]
    np.testing.assert_allclose(frequencies, wanted, rtol=1e-6)
    ratios = np.round(plain / frequencies, 3)
    assert ratios[0] == 1
    assert ratios[-1] == 8
    assert np.any((ratios > 1) & (ratios < 8))


def test_frequency_factors_divide_like_the_scaling_they_were_made_from() -> None:
    rope = Rope(500000.0, LLAMA_31)
    plain, scaled = (inverse_frequencies(r, 128) for r in (Rope(500000.0), rope))
    factors = FrequencyFactors(tuple((plain / scaled).tolist()))
    from_factors = inverse_frequencies(Rope(500000.0, factors), 128)
    np.testing.assert_allclose(from_factors, scaled, rtol=3e-7)


def test_linear_scaling_divides_every_frequency() -> None:
    plain, scaled = (inverse_frequencies(Rope(1e4, s), 16) for s in (None, LinearScaling(4.0)))
    np.testing.assert_array_equal(scaled, plain / 4)


@given(theta=st.floats(100, 1e7), half=st.integers(1, 128))
def test_frequencies_fall_from_one(theta: float, half: int) -> None:
    frequencies = inverse_frequencies(Rope(theta), 2 * half)
    assert frequencies.shape == (half,)
    assert frequencies[0] == 1
    assert np.all(np.diff(frequencies) < 0)
    assert frequencies[-1] > 0


@pytest.mark.parametrize(
    ("family", "extra"),
    [
        ("llama", set()),
        ("mistral", set()),
        ("qwen2", {"q_bias", "k_bias", "v_bias"}),
        ("qwen3", {"q_norm", "k_norm"}),
        ("gemma3", {"q_norm", "k_norm", "attn_post_norm", "mlp_post_norm"}),
    ],
)
def test_each_family_has_its_tensors(family: str, extra: set[str]) -> None:
    shapes = expected_tensors(TinyConfig(family=family, num_layers=3).architecture)
    common = {"attn_norm", "q", "k", "v", "o", "mlp_norm", "gate", "up", "down"}
    for i in range(3):
        assert {name.split(".")[2] for name in shapes if name.startswith(f"layers.{i}.")} == common | extra
    assert {name for name in shapes if "." not in name} == {"embed", "final_norm", "head"}


def test_shapes_are_outermost_first_and_a_tied_head_is_no_tensor() -> None:
    config = TinyConfig(hidden_size=64, num_heads=6, num_kv_heads=2, head_dim=20, tied_head=True, family="qwen3")
    tensors = expected_tensors(config.architecture)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    assert shapes["layers.1.q"] == (120, 64)
    assert shapes["layers.1.k"] == shapes["layers.1.v"] == (40, 64)
    assert shapes["layers.1.o"] == (64, 120)
    assert shapes["layers.1.down"] == (64, 96)
    assert shapes["layers.1.q_norm"] == (20,)
    assert "head" not in shapes
    split = {
        name.removeprefix("layers.0."): t.split_axis for name, t in tensors.items() if not name.startswith("layers.1")
    }
    outputs = dict.fromkeys(("embed", "q", "k", "v", "gate", "up"), 0)
    norms = dict.fromkeys(("attn_norm", "q_norm", "k_norm", "mlp_norm", "final_norm"))
    assert split == outputs | {"o": 1, "down": 1} | norms


def test_layers_of_one_kind_are_found_once() -> None:
    config = TinyConfig(family="gemma3", num_layers=7, pattern=3)
    assert config.architecture.distinct_layers() == [0, 2]
    assert [spec.window for spec in config.architecture.layers] == [21, 21, None, 21, 21, None, 21]
    assert TinyConfig(num_layers=3).architecture.distinct_layers() == [0]


def test_a_number_of_layers_that_no_model_has_is_refused_before_they_are_made() -> None:
    with pytest.raises(InputError, match="num_layers"):
        make_layers(1 << 40, lambda i: pytest.fail("made"))


def test_tiny_models_are_a_function_of_their_seed() -> None:
    a, b, c = (make_tensors(TinyConfig(seed=seed)) for seed in (1, 1, 2))
    assert all(np.array_equal(a[name], b[name]) for name in a)
    assert not np.array_equal(a["embed"], c["embed"])
