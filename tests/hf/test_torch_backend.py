"""The torch backend on a CPU: what every backend must do, in the shapes that the audit finds pure."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.backends import test_bursts as bursts  # noqa: E402
from tests.backends import test_conformance as conformance  # noqa: E402
from tests.backends import test_drafted_bursts as drafted  # noqa: E402
from tests.backends import test_provisions as provisions  # noqa: E402
from tests.support.passes import Tape  # noqa: E402
from tests.support.tiny_llm import loaded, write_model  # noqa: E402
from tests.support.tiny_models import TinyConfig, make_tensors  # noqa: E402
from verispec.backends import torch_backend  # noqa: E402
from verispec.backends.audit import audit  # noqa: E402
from verispec.backends.numpy_backend import NumpyBackend  # noqa: E402
from verispec.backends.options import LoadedModel, NumpyOptions, TorchOptions  # noqa: E402
from verispec.backends.torch_backend import TorchBackend  # noqa: E402
from verispec.errors import BackendDeadError, DeviceMemoryError, InputError  # noqa: E402
from verispec.llm import LLM  # noqa: E402

pytestmark = pytest.mark.hf

SIZES = {"num_slots": conformance.NUM_SLOTS, "num_seq_rows": 8, "max_tail": 32}
FAMILIES = {"llama": {}, "qwen2": {}, "qwen3": {}, "gemma3": {"num_layers": 3, "window": 21, "tied_head": True}}


def models(family: str) -> list[LoadedModel]:
    configs = [TinyConfig(family=family, seed=seed, context_len=256, **FAMILIES[family]) for seed in (1, 2)]
    return [LoadedModel(c.architecture, make_tensors(c).__getitem__) for c in configs]


def made(family: str, dtype: str = "float32") -> TorchBackend:
    return TorchBackend(models(family), TorchOptions(kv_dtype=dtype, threads=1, **SIZES))


@pytest.fixture(params=[*FAMILIES, "llama in bfloat16"])
def backend(request: pytest.FixtureRequest) -> TorchBackend:
    return made("llama", "bfloat16") if " in " in request.param else made(request.param)


@pytest.fixture
def family(backend: TorchBackend) -> tuple[int, ...]:
    shapes = audit(backend.probes(), shapes=(1, 4, 8, 16, 64, 256)).choose()
    if torch.cuda.is_available():
        pytest.skip(f"these tests take shapes that a CPU has in one family; this GPU's is {shapes}")
    assert {16, 64, 256} <= set(shapes)
    return shapes


@pytest.fixture
def make():
    return lambda: made("llama")


test_chunks = conformance.test_chunks_and_shapes_do_not_matter
test_neighbours = conformance.test_neighbours_and_index_do_not_matter
test_siblings = conformance.test_a_tree_row_does_not_see_its_sibling
test_views = conformance.test_views
test_stores = conformance.test_stores_share_slot_ids_and_nothing_else
test_recycled = conformance.test_recycled_rows_and_slots_keep_nothing
test_wanted = conformance.test_wanted_results_agree
test_distributions = conformance.test_a_distribution_lives_until_it_is_released
test_stable = conformance.test_results_are_stable
test_bad_arrays = conformance.test_bad_arrays_raise
test_a_burst = bursts.test_a_burst_is_its_rounds
test_from_state = bursts.test_a_burst_goes_on_from_where_the_last_left_it
test_masks_that_do_not_fit = provisions.test_masks_that_do_not_fit_are_refused
test_hidden_start = provisions.test_a_row_may_start_from_a_hidden_state
test_three_drafters = drafted.test_three_drafters_and_none_in_one_burst


@pytest.mark.parametrize("family", FAMILIES)
def test_it_computes_what_numpy_computes(family: str) -> None:
    """Up to rounding: products are summed in another order. Weights in bfloat16 are the control."""
    tokens = np.random.default_rng(3).integers(0, 16, 150).tolist()

    def fed(backend: NumpyBackend | TorchBackend) -> np.ndarray:
        return Tape(backend, seq_row=1, first_slot=0).feed(tokens, shape=256)

    plain = fed(NumpyBackend(models(family), NumpyOptions(**SIZES)))
    assert np.abs(plain - fed(made(family))).max() < 1e-4
    assert np.abs(plain - fed(made(family, "bfloat16"))).max() > 1e-3


def on_a_gpu_of(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """The CPU in the place of a GPU with so much memory."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (nbytes, nbytes))
    monkeypatch.setattr(torch_backend, "_device_name", lambda index: "cpu")


def test_the_share_of_a_gpus_memory_decides_how_much_kv_there_is(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_model(tmp_path / "tiny.gguf")
    on_a_gpu_of(monkeypatch, (3 << 30) + (4 << 20))
    slots = []
    for share in (0.502, 1.0):
        with loaded(path, tmp_path, backend="torch", gpu_memory=share, kv_dtype="float32") as llm:
            slots.append(llm.backend.limits.num_slots)
    assert 256 <= slots[0] < slots[1]
    with pytest.raises(InputError, match=r"leaves no room for K and V beside .* GiB of weights"):
        LLM(path, backend="torch", gpu_memory=0.4)
    with pytest.raises(InputError, match="there is no GPU 1"):
        LLM(path, backend="torch", device=1)

    def no_room(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "zeros", no_room)
    with pytest.raises(InputError, match="K/V of 300 tokens do not fit into the GPU's memory"):
        LLM(path, backend="torch", kv_slots=300)


@pytest.mark.parametrize("is_memory", [True, False])
def test_a_failed_device_is_dead_and_memory_that_ran_out_is_not(is_memory: bool, monkeypatch) -> None:
    backend = made("llama")

    def feed() -> np.ndarray:
        return Tape(backend, seq_row=1, first_slot=0).feed([1, 2, 3], shape=4)

    def fails(*args):
        raise torch.OutOfMemoryError("no room") if is_memory else torch.AcceleratorError("illegal access")

    expected = feed()
    with monkeypatch.context() as patch:
        patch.setattr(torch_backend, "attend", fails)
        with pytest.raises(DeviceMemoryError if is_memory else BackendDeadError):
            feed()
    if is_memory:
        assert (feed() == expected).all()
    else:
        with pytest.raises(BackendDeadError, match="illegal access"):
            feed()
