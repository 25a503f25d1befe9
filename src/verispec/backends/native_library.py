"""The shared library of native kernels: where it is, its structures, its functions. Nothing is computed here.

The structures mirror native/api.h field by field; `ABI` tells a library that was built from another version.
"""

import ctypes
import functools
import hashlib
import time
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verispec.errors import InputError

PATH = Path(__file__).with_name("_native.so")
ABI = 11
ARITHMETICS = ("cpu-1", "hopper-1")  # by the kernels' number
ACTIVATIONS = ("silu", "gelu_tanh")  # likewise


def address(array: NDArray[np.generic]) -> int:
    """Where a contiguous array begins; the caller keeps it alive."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]  # faster than numpy's
    except (TypeError, ValueError):  # it is empty or cannot be written, or it is not contiguous
        if not array.flags.c_contiguous:
            raise InputError("a native kernel needs a contiguous array") from None
        return int(array.ctypes.data) if array.size else 0


class Structure(ctypes.Structure):
    """Fields may be given as arrays: they are passed by address, and live as long as the structure."""

    def __init__(self, **fields: Any) -> None:
        self.arrays = {name: value for name, value in fields.items() if isinstance(value, np.ndarray)}
        super().__init__(**{**fields, **{name: address(array) for name, array in self.arrays.items()}})


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class Matrix(Structure):
    _fields_ = [*_fields(c_int32, "format num_out num_in"), ("data", c_void_p)]


class StoredMatrix(Structure):
    """A matrix as its file has it; `type` is ggml's number."""

    _fields_ = [*_fields(c_int32, "type num_out num_in quantises"), ("rows", c_void_p)]


class Layer(Structure):
    _fields_ = [
        *_fields(Matrix, "q k v o gate up down"),
        *_fields(c_void_p, "attn_norm mlp_norm qkv_bias q_norm k_norm attn_post_norm mlp_post_norm cos_sin"),
        ("query_scalar", c_float),
        *_fields(c_int32, "window activation"),
    ]


class Model(Structure):
    _fields_ = [
        *_fields(c_int32, "arithmetic num_layers hidden num_heads num_kv_heads head_dim mlp vocab kv_is_half"),
        *_fields(c_float, "norm_eps embed_scale"),
        ("layers", POINTER(Layer)),
        ("final_norm", c_void_p),
        *_fields(Matrix, "head embed"),
    ]


class RowArrays(Structure):
    ROWS = ("token_ids", "positions", "slots", "seq_rows", "prefix_lens", "tails", "tail_lens")
    _fields_ = [
        *_fields(c_int32, "num_rows tail_width table_width"),
        *_fields(c_void_p, " ".join(ROWS)),
        ("table", c_void_p),
    ]


class Store(Structure):
    _fields_ = [*_fields(c_void_p, "k v"), ("slots_per_layer", c_int64)]


class Sampling(Structure):
    _fields_ = [
        *_fields(c_int32, "num_rows num_penalties num_bias mask_words"),
        *_fields(c_void_p, "seeds t sample_index stream top_k temperature top_p log_min_p"),
        *_fields(c_void_p, "penalty_rows penalty_ids repetition penalty bias_rows bias_ids bias masks allowed"),
    ]
    ROWS = tuple(field[0] for field in _fields_[4:])


class Burst(Structure):
    _fields_ = [
        *_fields(c_int32, "num_sequences num_rounds num_stop_ids max_draft first_round end_round"),
        *_fields(c_void_p, "seq_rows rounds draft_lens stop_ids min_lens limits tokens t slot_tokens"),
        *_fields(c_void_p, "drawn logprobs drafts accepted"),
    ]


class Drafting(Structure):
    _fields_ = [
        ("model", POINTER(Model)),
        ("store", POINTER(Store)),
        *_fields(c_void_p, "skip_attention skip_mlp"),
        ("first_rows", c_int32),
        ("least_logprob", c_float),
    ]


_TYPES = {"p": c_void_p, "i": c_int, "l": c_int64, "f": c_float, "s": c_char_p, "-": None}
_SIGNATURES = {  # the result, then the arguments; structures and arrays go by address
    "vs_create": "p si",
    "vs_destroy": "- p",
    "vs_isa": "s p",
    "vs_pack": "i ppp",
    "vs_layers": "- pppppppii",
    "vs_logits": "- pppipp",
    "vs_totals": "- ppiip",
    "vs_draw": "- ppppippp",
    "vs_burst": "- ppppppppp",
    "vs_top_k": "- pppiiipp",
    "vs_noisy_top_k": "- pppipippp",
    "vs_linear": "- pippip",
    "vs_norm": "- pppiifp",
    "vs_activate": "- piipiip",
    "vs_attend": "- ppppipp",
    "vs_elementary": "- piplp",
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
    for name, signature in _SIGNATURES.items():
        result, arguments = signature.split()
        function = getattr(library, name)
        function.restype, function.argtypes = _TYPES[result], [_TYPES[a] for a in arguments]
    return library, hashlib.sha256(path.read_bytes()).hexdigest()[:16]


class Kernels:
    """One set of threads with the kernels of one instruction set ("": the best this CPU has)."""

    def __init__(self, num_threads: int, isa: str = "", path: Path | None = None) -> None:
        self._library, self.build = load(path or PATH)
        self._handle = self._library.vs_create(isa.encode(), num_threads)
        if not self._handle:
            raise InputError(f"this CPU, or this build, has no {isa} kernels")
        self.isa = str(self._library.vs_isa(self._handle).decode())
        self.seconds = 0.0  # that calls have taken so far

    def call(self, name: str, *arguments: Any) -> int | None:
        """Run one function of the library, give its result if it has one."""
        return self.prepared(name, *arguments)()

    def prepared(self, name: str, *arguments: Any) -> Callable[[], int | None]:
        """The call, to be made as often as wanted; what its arguments hold may change between."""
        function, passed = getattr(self._library, name), [_passed(argument) for argument in arguments]

        def run() -> int | None:
            start = time.perf_counter()
            result: int | None = function(self._handle, *passed)
            self.seconds += time.perf_counter() - start
            return result

        return run

    def close(self) -> None:
        if self._handle:
            self._library.vs_destroy(self._handle)
            self._handle = None

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()


def _passed(argument: Any) -> Any:
    if isinstance(argument, np.ndarray):
        return address(argument)
    return ctypes.byref(argument) if isinstance(argument, Structure) else argument
