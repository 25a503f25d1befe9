"""Weights as the native kernels read them: sixteen output columns interleaved, block by block, straight from the file.

Quantised tensors keep their own integers and scales: Q4_0, Q4_1, Q4_K as 4-bit, Q8_0 as 8-bit; the 5- and 6-bit types
as 8-bit integers with the scales they have, which changes no value. Nothing is requantised, except on request.
The layouts are described in native/api.h, the work is done in native/pack.cpp.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from verispec.backends import native_library as native
from verispec.errors import UnsupportedModelError
from verispec.model.blocks import FORMATS, StoredTensor

LANES = 16
BLOCK = 32
F32, F16, BF16, Q4, Q4_AFFINE, Q4_AFFINE_WIDE, Q8, Q8_WIDE, Q8_AFFINE_WIDE, Q8_HALVES = range(10)
_ALIGNMENT = 64

Bytes = NDArray[np.uint8]


class Layout(NamedTuple):
    """How a stored type is packed: the kernels' format, and what so many values of sixteen rows take."""

    format: int
    num_values: int
    nbytes: int


LAYOUTS = {
    "F32": Layout(F32, 1, 64),
    "F16": Layout(F16, 1, 32),
    "BF16": Layout(BF16, 1, 32),
    "Q4_0": Layout(Q4, BLOCK, 256 + 32),
    "Q4_1": Layout(Q4_AFFINE, BLOCK, 256 + 64),
    "Q4_K": Layout(Q4_AFFINE_WIDE, BLOCK, 256 + 128),
    "Q5_0": Layout(Q8, BLOCK, 512 + 32),
    "Q8_0": Layout(Q8, BLOCK, 512 + 32),
    "Q5_1": Layout(Q8_AFFINE_WIDE, BLOCK, 512 + 128),
    "Q5_K": Layout(Q8_AFFINE_WIDE, BLOCK, 512 + 128),
    "Q6_K": Layout(Q8_HALVES, BLOCK, 512 + 128),
}
FLOAT_TYPES = ("F32", "F16", "BF16")


class PackedMatrix(NamedTuple):
    """A matrix ready for the kernels. `data` is aligned and must outlive every use."""

    type_name: str  # as it was stored
    format: int
    num_out: int
    num_in: int
    data: Bytes
    is_finite: bool  # all scales, or float weights, are


def pack(stored: StoredTensor, kernels: native.Kernels, *, quantises: bool = False) -> PackedMatrix:
    """The tensor in the layout of its format, or of Q8_0: the one place where verispec quantises weights, on request.

    Raises UnsupportedModelError for a type without a layout.
    """
    if stored.type_name not in LAYOUTS:
        raise UnsupportedModelError(f"the native backend has no kernel for {stored.type_name}; --backend numpy has")
    fmt = FORMATS[stored.type_name]
    rows = np.ascontiguousarray(stored.data)
    num_out, num_in = len(rows), rows.shape[1] // fmt.block_nbytes * fmt.block_len
    quantises = quantises and stored.type_name in FLOAT_TYPES and num_in % BLOCK == 0
    layout = LAYOUTS["Q8_0" if quantises else stored.type_name]
    out = _aligned(-(-num_out // LANES) * (num_in // layout.num_values) * layout.nbytes)
    matrix = native.StoredMatrix(fmt.type_id, num_out, num_in, quantises, native.address(rows))
    is_finite = kernels.call("vs_pack", ctypes.byref(matrix), out)
    return PackedMatrix(stored.type_name, layout.format, num_out, num_in, out, bool(is_finite))


def _aligned(nbytes: int) -> Bytes:
    """Bytes at an address that is a multiple of 64."""
    buffer = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + nbytes]
