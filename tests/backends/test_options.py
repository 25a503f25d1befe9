"""What a backend does not serve is refused in one sentence that names the option."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.tiny_models import TinyConfig, make_tensors
from verispec.backends.native_backend import NativeBackend
from verispec.backends.numpy_backend import NumpyBackend
from verispec.backends.options import LoadedModel, NativeOptions, NumpyOptions
from verispec.backends.select import OPTIONS
from verispec.errors import InputError, UnsupportedModelError
from verispec.model.architecture import Experts, expected_tensors

SIZES = {"num_slots": 64, "num_seq_rows": 2}


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("numpy", "world_size", 2),
        ("numpy", "arithmetic", "cpu-1"),
        ("numpy", "weights", "q8"),
        ("numpy", "kv_dtype", "float16"),
        ("native", "world_size", 0),
        ("native", "arithmetic", "hopper-1"),
        ("native", "weights", "q4"),
        ("native", "kv_dtype", "bfloat16"),
    ],
)
def test_what_is_not_served_is_refused(name: str, option: str, value: str | int) -> None:
    with pytest.raises(InputError, match=f"^{option} is {value!r}; the {name} backend "):
        OPTIONS[name](**SIZES, **{option: value})


def test_the_fingerprint_names_the_arithmetic_and_no_backend() -> None:
    config = TinyConfig()
    numpy = NumpyBackend([LoadedModel(config.architecture, make_tensors(config).__getitem__)], NumpyOptions(**SIZES))
    native = NativeBackend(
        [LoadedModel(config.architecture, make_tensors(config).__getitem__)], NativeOptions(**SIZES, kv_dtype="float32")
    )
    for backend in (numpy, native):
        assert backend.fingerprint()["arithmetic"] in backend.arithmetics
        assert "backend" not in backend.fingerprint()
    assert native.fingerprint()["kv_dtype"] == "float32"


@pytest.mark.parametrize("options", [NumpyOptions(**SIZES), NativeOptions(**SIZES)])
def test_experts_are_refused(options: NumpyOptions | NativeOptions) -> None:
    dense = TinyConfig().architecture
    layers = (dense.layers[0], *(replace(spec, experts=Experts(8, 2)) for spec in dense.layers[1:]))
    for use in (expected_tensors, lambda architecture: options.limits([architecture])):
        use(dense)
        with pytest.raises(UnsupportedModelError, match="mixture of 8 experts"):
            use(replace(dense, layers=layers))
