"""Which backend runs a model: CUDA where there is a GPU for it, torch where there is another GPU, else native where it
was built, else numpy; or the one that is named.

Imports a backend only when it is asked for.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from contextlib import suppress

from verispec.backends.audit import Progress, no_progress
from verispec.backends.options import (
    DRAFT_BITS,
    SECOND_MODEL_WEIGHTS,
    BackendOptions,
    CudaOptions,
    HopperOptions,
    LoadedModel,
    NativeOptions,
    NumpyOptions,
    TorchOptions,
)
from verispec.backends.protocol import Backend
from verispec.config import MAX_SIZE, EngineConfig
from verispec.errors import InputError
from verispec.model.architecture import Architecture
from verispec.model.checkpoint import Checkpoint

OPTIONS: Mapping[str, type[BackendOptions]] = {
    options.NAME: options for options in (NativeOptions, NumpyOptions, CudaOptions, HopperOptions, TorchOptions)
}


def default_backend() -> str:
    """The fastest backend there is here."""
    from verispec.backends.cuda.available import num_devices, why_no_torch, why_not
    from verispec.backends.native_library import why_missing

    if why_not() is None:
        return "cuda"
    if num_devices() and why_no_torch() is None:
        return "torch"
    return "numpy" if why_missing() else "native"


def serving(arithmetic: str) -> str | None:
    """The fastest backend here that gives the bits of this arithmetic; None if there is none."""
    for name in ("cuda", "native", "numpy", "hopper"):
        if arithmetic in OPTIONS[name].SERVES["arithmetic"]:
            with suppress(InputError):
                check_name(name)
                return name
    return None


def _has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def what_is_lost(backend: str) -> str | None:
    """One line about the backend that this one stands in for, if it does."""
    from verispec.backends.cuda.available import why_no_device, why_not
    from verispec.backends.native_library import why_missing

    if backend == "torch" and (reason := why_not()) is not None:
        return f"the CUDA backend is missing: {reason}. torch serves, slower, in the shapes that the audit finds pure"
    if backend == "native" and why_no_device(0) is None and (reason := why_not()) is not None:
        return f"the CUDA backend is missing: {reason}. The CPU serves, many times slower"
    if backend == "numpy" and (reason := why_missing()) is not None:
        return f"the native backend is missing: {reason}. numpy serves, several times slower"
    return None


def engine_defaults(name: str) -> EngineConfig:
    """Sizes that suit a backend. A GPU takes many rows at once, and plans are made while it computes.

    Prompts in passes of 4,096 rows gain 1 % of a run of 8B over 2,048, but a stream would wait twice as long for them.
    """
    if name != "cuda":
        return EngineConfig()
    return EngineConfig(num_slots=MAX_SIZE, row_budget=4096, stream_row_budget=2048, max_running=512, depth=2)


def uses_gpu(name: str) -> bool:
    """Whether the backend keeps K and V in a GPU's memory here."""
    if name == "torch":
        from verispec.backends.gpu import num_gpus

        return num_gpus() > 0
    return name == "cuda"


def fitting_slots(
    architectures: Sequence[Architecture], *, device: int, gpu_memory: float, kv_dtype: str | None, fast_weights: str
) -> int:
    """How many tokens of K/V a GPU has room for."""
    from verispec.backends.gpu import fitting_slots as fitting

    nbytes = 4 if kv_dtype == "float32" else 2  # of weights, too
    draft_bits = [DRAFT_BITS[kind] for kind in (fast_weights, *[SECOND_MODEL_WEIGHTS] * (len(architectures) - 1))]
    return fitting(architectures, index=device, gpu_memory=gpu_memory, value_nbytes=nbytes, draft_bits=draft_bits)


def check_name(name: str, device: int = 0) -> None:
    """Raise InputError for a backend that does not exist, or not here."""
    if name not in OPTIONS:
        raise InputError(f"unknown backend {name!r}; known: {', '.join(OPTIONS)}")
    if issubclass(OPTIONS[name], NativeOptions) and (lost := what_is_lost("numpy")):
        raise InputError(f"backend {name}: {lost}")
    if name == "cuda":
        from verispec.backends.cuda.available import why_not

        if (reason := why_not(device)) is not None:
            raise InputError(f"backend cuda: {reason}")
    if name == "torch":
        if not _has_torch():
            raise InputError("backend torch: torch is missing: pip install 'verispec[cuda]'")
        from verispec.backends.gpu import num_gpus

        if device >= max(1, num_gpus()):
            raise InputError(f"backend torch: there is no GPU {device}: torch has {num_gpus()}")


def make_backend(
    options: BackendOptions, checkpoints: Sequence[Checkpoint], *, progress: Progress = no_progress
) -> Backend:
    """The backend of these options with the checkpoints' models in it: the target's first, then a draft model's."""
    if isinstance(options, CudaOptions):
        from verispec.backends.cuda.load import load

        return load(checkpoints, options, progress=progress)
    models = [LoadedModel(c.architecture, c.tensor, c.stored) for c in checkpoints]
    if isinstance(options, TorchOptions):
        from verispec.backends.gpu import all_of, loading
        from verispec.backends.torch_backend import TorchBackend

        with loading(all_of(options.num_slots)):
            return TorchBackend(models, options)
    if isinstance(options, NativeOptions):
        from verispec.backends.native_backend import NativeBackend

        return NativeBackend(models, options, progress=progress)
    from verispec.backends.numpy_backend import NumpyBackend

    return NumpyBackend(models, options)


def describe(name: str, architectures: Sequence[Architecture]) -> tuple[Mapping[str, str], tuple[int, ...]]:
    """Fingerprint and candidate shapes of a backend with default options, whose models need not be loaded for it."""
    options = OPTIONS[name](num_slots=1, num_seq_rows=1)
    if isinstance(options, TorchOptions):
        from verispec.backends import torch_backend

        return torch_backend.fingerprint(architectures, options), torch_backend.TorchBackend.shapes
    if name == "numpy":
        from verispec.backends import numpy_backend

        return numpy_backend.fingerprint(architectures, options), numpy_backend.NumpyBackend.shapes
    from verispec.backends import native_backend

    return native_backend.fingerprint(architectures, options), native_backend.SHAPES[options.arithmetic]
