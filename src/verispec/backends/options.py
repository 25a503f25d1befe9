"""How a backend is set up: one frozen class per backend, which says what it serves. Imports no backend."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from verispec.backends.protocol import BackendLimits, Float32, HiddenShape
from verispec.errors import InputError
from verispec.model.architecture import Architecture, check_dense
from verispec.model.blocks import StoredTensor

NUM_MASKS = 1024  # what is never written takes no memory
AS_STORED, QUANTISED = "as-stored", "q8"
DRAFT_BITS = {"same": 0, "int4": 4, "int8": 8, "fp8": 8}  # of weights that are for drafts alone
SECOND_MODEL_WEIGHTS = "int8"  # a draft model's weights in passes of few rows, on a GPU: they are for drafts alone
HOPPER = "hopper-1"  # docs/cuda-arithmetic.md


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What a backend needs of a checkpoint: float32 tensors by name, and matrices as the files have them.

    Without `stored` the matrices are float32 too.
    """

    architecture: Architecture
    read: Callable[[str], Float32]
    stored: Callable[[str], StoredTensor] | None = None


@dataclass(frozen=True, kw_only=True)
class BackendOptions:
    """What every backend is told. An empty option of `SERVES` becomes the first that the backend serves."""

    NAME: ClassVar[str]
    SERVES: ClassVar[Mapping[str, tuple[str, ...]]]

    num_slots: int
    num_seq_rows: int
    context_len: int | None = None  # None: the target's own
    max_tail: int = 64
    threads: int | None = None  # None: all cores
    arithmetic: str = ""  # what defines the bits
    weights: str = ""
    kv_dtype: str = ""
    world_size: int = 1  # devices that share a model

    def __post_init__(self) -> None:
        if self.world_size != 1:
            raise InputError(f"world_size is {self.world_size}; the {self.NAME} backend runs a model on one device")
        for option, served in self.SERVES.items():
            found = getattr(self, option) or served[0]
            if found not in served:
                raise InputError(f"{option} is {found!r}; the {self.NAME} backend serves: {', '.join(served)}")
            object.__setattr__(self, option, found)

    def limits(self, architectures: Sequence[Architecture]) -> BackendLimits:
        """Those of a backend with these models, the target's first."""
        target = architectures[0]
        for architecture in architectures:
            check_dense(architecture)
            if architecture.vocab_size != target.vocab_size:
                raise InputError("models that share a backend must share their vocabulary")
        # The target's alone: beyond its own context a draft model guesses badly, which is no reason to end a request.
        context_len = min(self.context_len or target.context_len, target.context_len)
        return BackendLimits(
            vocab_size=target.vocab_size,
            context_len=context_len,
            num_slots=self.num_slots,
            num_seq_rows=self.num_seq_rows,
            max_tail=self.max_tail,
            num_stores=len(architectures),
            num_masks=NUM_MASKS,
            follows=True,
            hidden=tuple(HiddenShape(a.num_layers, a.hidden_size) for a in architectures),
        )


@dataclass(frozen=True, kw_only=True)
class NumpyOptions(BackendOptions):
    """The numpy backend, which computes in one thread. Its arithmetic is numbered anew when a kernel changes bits."""

    NAME = "numpy"
    SERVES: ClassVar = {"arithmetic": ("numpy-2",), "weights": (AS_STORED,), "kv_dtype": ("float32",)}


@dataclass(frozen=True, kw_only=True)
class NativeOptions(BackendOptions):
    """The native backend: `cpu-1` is one arithmetic for every CPU, so `isa`, the kernels' instructions, is no part of
    it. Weights of `q8` are float matrices quantised at load.
    """

    NAME = "native"
    SERVES: ClassVar = {"arithmetic": ("cpu-1",), "weights": (AS_STORED, QUANTISED), "kv_dtype": ("float16", "float32")}

    isa: str = ""  # the best this CPU has


@dataclass(frozen=True, kw_only=True)
class HopperOptions(NativeOptions):
    """The native backend with the arithmetic of the CUDA backend: a GPU's bits on a CPU, slowly."""

    NAME = "hopper"
    SERVES: ClassVar = {"arithmetic": (HOPPER,), "weights": (AS_STORED,), "kv_dtype": ("bfloat16",)}


@dataclass(frozen=True, kw_only=True)
class TorchOptions(BackendOptions):
    """The torch backend, on GPU number `device`, or on the CPU where torch has no GPU; weights are of `kv_dtype`, too.
    Its arithmetic is whatever torch does there."""

    NAME = "torch"
    SERVES: ClassVar = {"arithmetic": ("torch-1",), "weights": (AS_STORED,), "kv_dtype": ("bfloat16", "float32")}

    device: int = 0


@dataclass(frozen=True, kw_only=True)
class CudaOptions(BackendOptions):
    """The CUDA backend, on GPU number `device`; `cache_folder` is where it keeps compiled kernels. `fast_weights` are
    those of passes from which nothing is committed: no part of the arithmetic."""

    NAME = "cuda"
    SERVES: ClassVar = {**HopperOptions.SERVES, "fast_weights": tuple(DRAFT_BITS)}

    device: int = 0
    cache_folder: Path | None = None
    fast_weights: str = ""
