"""GGML's block formats: how many bytes a tensor takes, and its values as float32.

The formats that models of ours are mostly stored in are decoded here, in cache-sized pieces; the rest goes through the
`gguf` package, imported only then. Every result equals `gguf.quants` bit for bit (the tests compare all types).
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]
Floats: TypeAlias = npt.NDArray[np.float32]


class StoredTensor(NamedTuple):
    """A matrix as its file has it: ggml's name of the type, and the bytes of each row."""

    type_name: str
    data: Bytes  # [rows, row bytes]


class BlockFormat(NamedTuple):
    """A ggml type: its number in files, and the values and bytes of one block."""

    type_id: int
    block_len: int
    block_nbytes: int


FORMATS: dict[str, BlockFormat] = {
    "F32": BlockFormat(0, 1, 4),
    "F16": BlockFormat(1, 1, 2),
    "BF16": BlockFormat(30, 1, 2),
    "Q8_0": BlockFormat(8, 32, 34),
    "Q4_0": BlockFormat(2, 32, 18),
    "Q4_1": BlockFormat(3, 32, 20),
    "Q5_0": BlockFormat(6, 32, 22),
    "Q5_1": BlockFormat(7, 32, 24),
    "Q4_K": BlockFormat(12, 256, 144),
    "Q5_K": BlockFormat(13, 256, 176),
    "Q6_K": BlockFormat(14, 256, 210),
}

# 4096 blocks of 32 values are 512 KiB of float32: the working set stays in the second-level cache.
_BLOCKS_PER_PIECE = 4096


def bf16_to_float32(bits: npt.NDArray[np.uint16]) -> Floats:
    """Values of bfloat16 bit patterns, exactly: they are the upper halves of float32 patterns."""
    return np.left_shift(bits, 16, dtype=np.uint32).view(np.float32)


def to_float32(data: Bytes, type_name: str) -> Floats:
    """The values of tensor bytes [..., row bytes] in the named format; a view of `data` when that is F32 already."""
    fmt = FORMATS[type_name]
    shape = (*data.shape[:-1], data.shape[-1] // fmt.block_nbytes * fmt.block_len)
    if type_name == "F32":
        return np.require(data.view(np.float32), requirements=["C", "ALIGNED"])
    if type_name == "F16":
        return data.view(np.float16).astype(np.float32)
    if type_name == "BF16":
        return bf16_to_float32(data.view(np.uint16))
    if decode := _DECODERS.get(type_name):
        return _by_pieces(decode, data.reshape(-1, fmt.block_nbytes), fmt).reshape(shape)
    from gguf import GGMLQuantizationType, quants

    values: Floats = quants.dequantize(data, GGMLQuantizationType(fmt.type_id))
    return values


def _by_pieces(decode: Callable[[Bytes, Floats], None], blocks: Bytes, fmt: BlockFormat) -> Floats:
    out = np.empty((len(blocks), fmt.block_len), dtype=np.float32)
    for start in range(0, len(blocks), _BLOCKS_PER_PIECE):
        piece = slice(start, start + _BLOCKS_PER_PIECE)
        decode(blocks[piece], out[piece])
    return out


def _half(blocks: Bytes, start: int) -> Floats:
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)  # [blocks, 1]


def _nibbles(packed: Bytes, out: Floats) -> None:
    # Byte j of a block holds value j in its low half and value j + 16 in its high half.
    out[:, :16] = packed & 0x0F
    out[:, 16:] = packed >> 4


def _decode_q8_0(blocks: Bytes, out: Floats) -> None:
    out[:] = blocks[:, 2:].view(np.int8)
    out *= _half(blocks, 0)


def _decode_q4_0(blocks: Bytes, out: Floats) -> None:
    _nibbles(blocks[:, 2:], out)
    out -= np.float32(8)
    out *= _half(blocks, 0)


def _decode_q4_1(blocks: Bytes, out: Floats) -> None:
    _nibbles(blocks[:, 4:], out)
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


_DECODERS: dict[str, Callable[[Bytes, Floats], None]] = {
    "Q8_0": _decode_q8_0,
    "Q4_0": _decode_q4_0,
    "Q4_1": _decode_q4_1,
}
