"""GGML's block formats: how many bytes a tensor takes, and its values as float32.

Blocks are decoded in cache-sized pieces. Every result equals `gguf.quants` bit for bit (the tests compare all types).
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

_PIECE_LEN = 1 << 17  # 512 KiB of float32: the working set stays in the second-level cache


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
    return _by_pieces(_DECODERS[type_name], data.reshape(-1, fmt.block_nbytes), fmt).reshape(shape)


def _by_pieces(decode: Callable[[Bytes, Floats], None], blocks: Bytes, fmt: BlockFormat) -> Floats:
    out = np.empty((len(blocks), fmt.block_len), dtype=np.float32)
    count = _PIECE_LEN // fmt.block_len
    for start in range(0, len(blocks), count):
        piece = slice(start, start + count)
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


def _fives(blocks: Bytes, start: int, out: Floats) -> None:
    """Four bytes with the fifth bit of all 32 values, then their low halves."""
    fifths = np.unpackbits(blocks[:, start : start + 4], axis=1, bitorder="little")
    _nibbles(blocks[:, start + 4 :], out)
    out += fifths * np.float32(16)


def _decode_q5_0(blocks: Bytes, out: Floats) -> None:
    _fives(blocks, 2, out)
    out -= np.float32(16)
    out *= _half(blocks, 0)


def _decode_q5_1(blocks: Bytes, out: Floats) -> None:
    _fives(blocks, 4, out)
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _scales_and_mins(packed: Bytes) -> tuple[Floats, Floats]:
    """Two times eight numbers of six bits in twelve bytes; two bits of the last four stand above those of the first."""
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=1)
    mins = np.concatenate([middle & 63, high >> 4 | middle >> 6 << 4], axis=1)
    return scales.astype(np.float32), mins.astype(np.float32)


def _scale_groups(blocks: Bytes, values: Floats) -> None:
    """Eight groups of 32 values, each with a scale and a minimum of its own; `values` [blocks, 8, 32] is written."""
    scales, mins = _scales_and_mins(blocks[:, 4:16])
    values *= (_half(blocks, 0) * scales)[:, :, None]
    values -= (_half(blocks, 2) * mins)[:, :, None]


def _pairs_of_groups(packed: Bytes, values: Floats) -> None:
    """32 bytes hold one group in their low halves and the next in their high ones."""
    pairs = packed.reshape(len(packed), 4, 32)
    values[:, 0::2], values[:, 1::2] = pairs & 15, pairs >> 4


def _decode_q4_k(blocks: Bytes, out: Floats) -> None:
    values = out.reshape(len(out), 8, 32)
    _pairs_of_groups(blocks[:, 16:], values)
    _scale_groups(blocks, values)


def _decode_q5_k(blocks: Bytes, out: Floats) -> None:
    values = out.reshape(len(out), 8, 32)
    _pairs_of_groups(blocks[:, 48:], values)
    fifths = np.unpackbits(blocks[:, 16:48], axis=1, bitorder="little").reshape(len(out), 32, 8)  # bit i: group i
    values += fifths.transpose(0, 2, 1) * np.float32(16)
    _scale_groups(blocks, values)


def _decode_q6_k(blocks: Bytes, out: Floats) -> None:
    """Two halves of 128 values: 64 bytes with low halves and 32 with four times two bits; 16 values share a scale."""
    count = len(out)
    low, top = blocks[:, :128].reshape(count, 2, 64), blocks[:, 128:192].reshape(count, 2, 1, 32)
    halves = np.stack([low & 15, low >> 4], axis=2).reshape(count, 2, 4, 32)
    bits = top >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    values = out.reshape(count, 16, 16)
    values[:] = (halves | bits << 4).reshape(count, 16, 16)
    values -= np.float32(32)
    values *= (_half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32))[:, :, None]


_DECODERS: dict[str, Callable[[Bytes, Floats], None]] = {
    "Q8_0": _decode_q8_0,
    "Q4_0": _decode_q4_0,
    "Q4_1": _decode_q4_1,
    "Q5_0": _decode_q5_0,
    "Q5_1": _decode_q5_1,
    "Q4_K": _decode_q4_k,
    "Q5_K": _decode_q5_k,
    "Q6_K": _decode_q6_k,
}
