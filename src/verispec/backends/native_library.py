"""The shared library of native kernels: where it is, its structures, its functions. Nothing is computed here.

The structures mirror native/api.h field by field; `ABI` tells a library that was built from another version.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from verispec.errors import InputError

PATH = Path(__file__).with_name("_native.so")
ABI = 8
ARITHMETICS = ("cpu-1", "hopper-1")  # by the kernels' number
ACTIVATIONS = ("silu", "gelu_tanh")  # likewise


class Matrix(Structure):
    """A packed matrix."""

    _fields_ = [("format", c_int32), ("num_out", c_int32), ("num_in", c_int32), ("data", c_void_p)]


class StoredMatrix(Structure):
    """A matrix as its file has it; `type` is ggml's number."""

    _fields_ = [
        *((name, c_int32) for name in ("type", "num_out", "num_in", "quantises")),
        ("rows", c_void_p),
    ]


class Layer(Structure):
    """What one layer does, and its weights."""

    _fields_ = [
        *((name, Matrix) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        *(
            (name, c_void_p)
            for name in (
                "attn_norm", "mlp_norm", "qkv_bias", "q_norm", "k_norm", "attn_post_norm", "mlp_post_norm", "cos_sin"
            )
        ),
        ("query_scalar", c_float),
        ("window", c_int32),
        ("activation", c_int32),
    ]  # fmt: skip


class Model(Structure):
    """Sizes and weights."""

    _fields_ = [
        *(
            (name, c_int32)
            for name in (
                "arithmetic", "num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim", "mlp", "vocab",
                "kv_is_half",
            )
        ),
        ("norm_eps", c_float),
        ("embed_scale", c_float),
        ("layers", POINTER(Layer)),
        ("final_norm", c_void_p),
        ("head", Matrix),
        ("embed", Matrix),
    ]  # fmt: skip


class RowArrays(Structure):
    """The rows of a pass and the slot table."""

    _fields_ = [
        *((name, c_int32) for name in ("num_rows", "tail_width", "table_width")),
        *(
            (name, c_void_p)
            for name in (
                "token_ids", "positions", "slots", "seq_rows", "prefix_lens", "tails", "tail_lens", "table"
            )
        ),
    ]  # fmt: skip


class Store(Structure):
    """K and V of all layers."""

    _fields_ = [("k", c_void_p), ("v", c_void_p), ("slots_per_layer", c_int64)]


class Sampling(Structure):
    """Sampling inputs of a pass."""

    _fields_ = [
        *((name, c_int32) for name in ("num_rows", "num_penalties", "num_bias", "mask_words")),
        *(
            (name, c_void_p)
            for name in (
                "seeds", "t", "sample_index", "stream", "top_k", "temperature", "top_p", "log_min_p", "penalty_rows",
                "penalty_ids", "repetition", "penalty", "bias_rows", "bias_ids", "bias", "masks", "allowed",
            )
        ),
    ]  # fmt: skip


class Burst(Structure):
    """Rounds of some sequences."""

    _fields_ = [
        *((name, c_int32) for name in ("num_sequences", "num_rounds", "num_stop_ids", "max_draft")),
        *(
            (name, c_void_p)
            for name in (
                "seq_rows", "rounds", "draft_lens", "stop_ids", "min_lens", "limits", "tokens", "earlier", "t", "drawn",
                "logprobs", "drafts", "accepted",
            )
        ),
    ]  # fmt: skip


class Drafting(Structure):
    """What drafts in a burst."""

    _fields_ = [
        ("model", POINTER(Model)),
        ("store", POINTER(Store)),
        ("skip_attention", c_void_p),
        ("skip_mlp", c_void_p),
        ("first_rows", c_int32),
        ("least_logprob", c_float),
    ]


_SIGNATURES = {
    "vs_create": (c_void_p, [c_char_p, c_int]),
    "vs_destroy": (None, [c_void_p]),
    "vs_isa": (c_char_p, [c_void_p]),
    "vs_pack": (c_int, [c_void_p, POINTER(StoredMatrix), c_void_p]),
    "vs_layers": (
        None,
        [c_void_p, POINTER(Model), POINTER(RowArrays), POINTER(Store), *[c_void_p] * 3, c_int, c_int],
    ),
    "vs_logits": (None, [c_void_p, POINTER(Model), c_void_p, c_int, c_void_p, c_void_p]),
    "vs_totals": (None, [c_void_p, c_void_p, c_int, c_int, c_void_p]),
    "vs_draw": (None, [c_void_p, c_void_p, c_void_p, c_void_p, c_int, POINTER(Sampling), c_void_p, c_void_p]),
    "vs_burst": (
        None,
        [
            c_void_p,
            POINTER(Model),
            POINTER(RowArrays),
            POINTER(Store),
            c_void_p,
            c_void_p,
            POINTER(Sampling),
            POINTER(Burst),
            POINTER(Drafting),
        ],
    ),
    "vs_top_k": (None, [c_void_p, c_void_p, c_void_p, c_int, c_int, c_int, c_void_p, c_void_p]),
    "vs_noisy_top_k": (None, [c_void_p, c_void_p, c_void_p, c_int, POINTER(Sampling), c_int, *[c_void_p] * 3]),
    "vs_linear": (None, [c_void_p, c_int, POINTER(Matrix), c_void_p, c_int, c_void_p]),
    "vs_norm": (None, [c_void_p, c_void_p, c_void_p, c_int, c_int, c_float, c_void_p]),
    "vs_activate": (None, [c_void_p, c_int, c_int, c_void_p, c_int, c_int, c_void_p]),
    "vs_attend": (None, [c_void_p, POINTER(Model), POINTER(RowArrays), POINTER(Store), c_int, c_void_p, c_void_p]),
    "vs_elementary": (None, [c_void_p, c_int, c_void_p, c_int64, c_void_p]),
}


def why_missing() -> str | None:
    """Why there are no native kernels, in a few words; None if there are."""
    if not PATH.is_file():
        return "it was not built (was there a C++ compiler when verispec was installed?)"
    try:
        load(PATH)
    except (OSError, AttributeError, InputError) as error:
        return f"it cannot be loaded: {error}"
    return None


@functools.cache
def load(path: Path) -> tuple[ctypes.CDLL, str]:
    """The library, with its signatures, and sixteen hex digits that name its build: another source or compiler gives
    another speed. Calls release the interpreter's lock.
    """
    library = ctypes.CDLL(str(path))
    if library.vs_abi() != ABI:
        raise InputError(f"the native kernels have interface {library.vs_abi()}, not {ABI}: install verispec again")
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library, hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def address(array: NDArray[np.generic]) -> int:
    """Where a contiguous array begins; the caller keeps it alive."""
    if not array.flags.c_contiguous:
        raise InputError("a native kernel needs a contiguous array")
    return int(array.ctypes.data)


class Kernels:
    """One set of threads with the kernels of one instruction set ("": the best this CPU has)."""

    def __init__(self, num_threads: int, isa: str = "", path: Path | None = None) -> None:
        self._library, self.build = load(path or PATH)
        self._handle = self._library.vs_create(isa.encode(), num_threads)
        if not self._handle:
            raise InputError(f"this CPU, or this build, has no {isa} kernels")

    @property
    def isa(self) -> str:
        """The instruction set in use."""
        return str(self._library.vs_isa(self._handle).decode())

    def call(self, name: str, *arguments: object) -> int | None:
        """Run one function of the library, give its result if it has one; arrays are passed by address."""
        converted = [address(a) if isinstance(a, np.ndarray) else a for a in arguments]
        result: int | None = getattr(self._library, name)(self._handle, *converted)
        return result

    def close(self) -> None:
        """End the threads."""
        if self._handle:
            self._library.vs_destroy(self._handle)
            self._handle = None

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()
