"""What a backend does not serve is refused in one sentence that names the option."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.tiny_models import TinyConfig, make_tensors
from verispec.backends import select
from verispec.backends.cuda import available
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


@pytest.mark.parametrize(("num_devices", "has_torch"), [(1, True), (1, False), (0, True)])
def test_on_another_gpu_torch_serves_and_says_so(
    monkeypatch: pytest.MonkeyPatch, num_devices: int, has_torch: bool
) -> None:
    monkeypatch.setattr(available, "why_not", lambda index=0: "device 0 has compute capability 8.0")
    monkeypatch.setattr(available, "num_devices", lambda: num_devices)
    monkeypatch.setattr(available, "why_no_torch", lambda: None if has_torch else "torch is missing")
    monkeypatch.setattr(select, "_has_torch", lambda: has_torch)
    name = select.default_backend()
    assert (name == "torch") is bool(num_devices and has_torch)
    lost = select.what_is_lost(name)
    assert ("capability 8.0. torch serves" in str(lost)) is (name == "torch")
    if not has_torch:
        with pytest.raises(InputError, match="torch is missing"):
            select.check_name("torch")
