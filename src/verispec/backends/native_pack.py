"""Weights as the native kernels read them: sixteen output columns interleaved, block by block, straight from the file.

Quantised tensors keep their own integers and scales: Q4_0, Q4_1, Q4_K as 4-bit, Q8_0 as 8-bit; the 5- and 6-bit types
as 8-bit integers with the scales they have, which changes no value. Nothing is requantised, except on request: `to_q8`.
The layouts are described in native/api.h.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from verispec.errors import UnsupportedModelError
from verispec.model.blocks import StoredTensor

LANES = 16
BLOCK = 32
F32, F16, BF16, Q4, Q4_AFFINE, Q4_AFFINE_WIDE, Q8, Q8_WIDE, Q8_AFFINE_WIDE, Q8_HALVES = range(10)
_ALIGNMENT = 64
_SUPER = 256  # values of a K-type block
_FLOAT_FORMATS = {"F32": (F32, np.uint32), "F16": (F16, np.uint16), "BF16": (BF16, np.uint16)}

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int8]
Floats = NDArray[np.float32]
Halves = NDArray[np.float16]


class PackedMatrix(NamedTuple):
    """A matrix ready for the kernels. `data` is aligned and must outlive every use."""

    format: int
    num_out: int
    num_in: int
    data: Bytes


class _Blocks(NamedTuple):
    """A quantised matrix apart: integers [out, blocks, 32], packed two to a byte for 4 bits, then scales and minima."""

    format: int
    values: NDArray[np.uint8] | NDArray[np.int8]
    scales: list[Halves] | list[Floats]  # each [out, blocks]


def pack(stored: StoredTensor) -> PackedMatrix:
    """The tensor in the layout of its format. Raises UnsupportedModelError for a type without one."""
    if stored.type_name in _FLOAT_FORMATS:
        return _pack_floats(stored)
    if stored.type_name not in _READERS:
        raise UnsupportedModelError(f"the native backend has no kernel for {stored.type_name}; --backend numpy has")
    blocks = _READERS[stored.type_name](stored.data)
    num_out, num_blocks = blocks.values.shape[:2]
    padding = -num_out % LANES
    parts = [_interleave(_pad(blocks.values, padding))]
    parts += [_interleave_scales(_pad(scale, padding)) for scale in blocks.scales]
    joined = np.concatenate(parts, axis=2)  # [groups, blocks, bytes]
    return PackedMatrix(blocks.format, num_out, num_blocks * BLOCK, _aligned(joined))


def has_bad_scales(matrix: PackedMatrix, stored: StoredTensor) -> bool:
    """Whether a scale, or a float weight, is NaN or infinite."""
    if stored.type_name == "BF16":
        return bool((stored.data.view(np.uint16) & 0x7F80 == 0x7F80).any())
    if stored.type_name in _FLOAT_FORMATS:
        values = stored.data.view(np.float32 if stored.type_name == "F32" else np.float16)
        return not np.isfinite(values).all()
    return not all(np.isfinite(scale).all() for scale in _READERS[stored.type_name](stored.data).scales)


def to_q8(values: Floats) -> StoredTensor:
    """Float weights as Q8_0 blocks: the one place where verispec quantises weights, because it was asked to."""
    blocks = values.reshape(len(values), -1, BLOCK)
    scales = (np.abs(blocks).max(axis=-1) / np.float32(127)).astype(np.float16)  # [out, blocks]
    wide = scales.astype(np.float32)[..., None]
    inverse = np.divide(np.float32(1), wide, out=np.zeros_like(wide), where=wide > 0)
    integers = np.clip(np.rint(blocks * inverse), -127, 127).astype(np.int8)
    data = np.concatenate([scales[..., None].view(np.uint8), integers.view(np.uint8)], axis=-1)
    return StoredTensor("Q8_0", data.reshape(len(values), -1))


def _pack_floats(stored: StoredTensor) -> PackedMatrix:
    number, dtype = _FLOAT_FORMATS[stored.type_name]
    values = np.ascontiguousarray(stored.data).view(dtype)  # [out, in]
    num_out, num_in = values.shape
    padded = _pad(values, -num_out % LANES)
    groups = padded.reshape(-1, LANES, num_in).transpose(0, 2, 1)  # [groups, in, 16]
    return PackedMatrix(number, num_out, num_in, _aligned(np.ascontiguousarray(groups).view(np.uint8)))


def _interleave(values: NDArray[np.generic]) -> Bytes:
    """[out, blocks, n bytes] -> [groups, blocks, 16 n]: four bytes of each of sixteen columns in turn."""
    num_out, num_blocks, width = values.shape
    split = values.view(np.uint8).reshape(num_out // LANES, LANES, num_blocks, width // 4, 4)
    return np.ascontiguousarray(split.transpose(0, 2, 3, 1, 4)).reshape(num_out // LANES, num_blocks, -1)


def _interleave_scales(scales: NDArray[np.generic]) -> Bytes:
    """[out, blocks] -> [groups, blocks, 16 scales as bytes]"""
    num_out, num_blocks = scales.shape
    split = scales.reshape(num_out // LANES, LANES, num_blocks).transpose(0, 2, 1)
    return np.ascontiguousarray(split).view(np.uint8)


def _pad(values: NDArray[np.generic], count: int) -> NDArray[np.generic]:
    if not count:
        return np.ascontiguousarray(values)
    return np.concatenate([values, np.zeros((count, *values.shape[1:]), values.dtype)])


def _aligned(data: NDArray[np.generic]) -> Bytes:
    """The bytes at an address that is a multiple of 64."""
    flat = data.reshape(-1).view(np.uint8)
    buffer = np.empty(flat.size + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    aligned = buffer[start : start + flat.size]
    aligned[:] = flat
    return aligned


def _split(data: Bytes, nbytes: int) -> Bytes:
    return np.ascontiguousarray(data).reshape(len(data), -1, nbytes)  # [out, blocks, bytes]


def _half(blocks: Bytes, start: int) -> Halves:
    return np.ascontiguousarray(blocks[..., start : start + 2]).view(np.float16)[..., 0]  # [out, blocks]


def _read_q8_0(data: Bytes) -> _Blocks:
    blocks = _split(data, 34)
    return _Blocks(Q8, np.ascontiguousarray(blocks[..., 2:]).view(np.int8), [_half(blocks, 0)])


def _read_q4_0(data: Bytes) -> _Blocks:
    blocks = _split(data, 18)
    return _Blocks(Q4, blocks[..., 2:], [_half(blocks, 0)])


def _read_q4_1(data: Bytes) -> _Blocks:
    blocks = _split(data, 20)
    return _Blocks(Q4_AFFINE, blocks[..., 4:], [_half(blocks, 0), _half(blocks, 2)])


def _fifth_bits(packed: Bytes) -> Ints:
    """The 32 high bits of a 5-bit block, [..., 4 bytes] -> [..., 32], as 0 or 16."""
    bits = np.unpackbits(packed, axis=-1, bitorder="little")
    return (bits << 4).astype(np.int8)


def _nibbles(packed: Bytes) -> Ints:
    """[..., 16 bytes] -> [..., 32]: low halves first."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1).astype(np.int8)


def _read_q5_0(data: Bytes) -> _Blocks:
    blocks = _split(data, 22)
    values = _nibbles(blocks[..., 6:]) + _fifth_bits(blocks[..., 2:6]) - np.int8(16)
    return _Blocks(Q8, values, [_half(blocks, 0)])


def _read_q5_1(data: Bytes) -> _Blocks:
    blocks = _split(data, 24)
    values = _nibbles(blocks[..., 8:]) + _fifth_bits(blocks[..., 4:8])
    return _Blocks(Q8_AFFINE_WIDE, values, [_half(blocks, i).astype(np.float32) for i in (0, 2)])


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scales and minima of the eight sub-blocks of a Q4_K or Q5_K block: 6 bits each in 12 bytes. [out, 8 blocks]"""
    packed = blocks[..., 4:16]
    low, high, rest = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = np.concatenate([low & 63, (rest & 15) | (low >> 6) << 4], axis=-1)
    minima = np.concatenate([high & 63, (rest >> 4) | (high >> 6) << 4], axis=-1)
    d, dmin = (_half(blocks, i).astype(np.float32)[..., None] for i in (0, 2))
    shape = (len(blocks), -1)
    # Products of 11 and 6 significant bits: exact in float32.
    return (d * scales.astype(np.float32)).reshape(shape), -(dmin * minima.astype(np.float32)).reshape(shape)


def _read_q4_k(data: Bytes) -> _Blocks:
    blocks = _split(data, 144)
    packed = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32)  # 64 values each: low halves, then high halves
    values = np.stack([packed & 15, packed >> 4], axis=3).reshape(len(blocks), -1, BLOCK)  # [out, 8 blocks, 32]
    return _Blocks(Q4_AFFINE_WIDE, values[..., :16] | values[..., 16:] << 4, list(_k_scales(blocks)))


def _read_q5_k(data: Bytes) -> _Blocks:
    blocks = _split(data, 176)
    packed = blocks[..., 48:].reshape(*blocks.shape[:2], 4, 32)
    low = np.stack([packed & 15, packed >> 4], axis=3).reshape(*blocks.shape[:2], 8, BLOCK)
    bit = np.arange(8, dtype=np.uint8)[:, None]
    high = (blocks[..., 16:48][:, :, None, :] >> bit) & 1  # [out, blocks, 8, 32]
    values = (low | high << 4).astype(np.int8).reshape(len(blocks), -1, BLOCK)
    return _Blocks(Q8_AFFINE_WIDE, values, list(_k_scales(blocks)))


def _read_q6_k(data: Bytes) -> _Blocks:
    blocks = _split(data, 210)
    low = blocks[..., :128].reshape(*blocks.shape[:2], 2, 64)
    high = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 32)
    parts = []
    for quarter in range(4):  # 32 values each of every half
        nibbles = low[..., (quarter % 2) * 32 : (quarter % 2) * 32 + 32] >> (4 * (quarter // 2)) & 15
        parts.append(nibbles | ((high >> (2 * quarter)) & 3) << 4)
    values = np.stack(parts, axis=3).reshape(len(blocks), -1, BLOCK).astype(np.int8) - np.int8(32)
    scales = blocks[..., 192:208].view(np.int8).astype(np.float32) * _half(blocks, 208).astype(np.float32)[..., None]
    halves = scales.reshape(len(blocks), -1, 2)  # one per 16 values
    return _Blocks(Q8_HALVES, values, [np.ascontiguousarray(halves[..., i]) for i in (0, 1)])


_READERS: dict[str, Callable[[Bytes], _Blocks]] = {
    "Q8_0": _read_q8_0,
    "Q4_0": _read_q4_0,
    "Q4_1": _read_q4_1,
    "Q5_0": _read_q5_0,
    "Q5_1": _read_q5_1,
    "Q4_K": _read_q4_k,
    "Q5_K": _read_q5_k,
    "Q6_K": _read_q6_k,
}
