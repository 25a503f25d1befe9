"""Reads GGUF versions 2 and 3, little-endian: metadata, the tensor table, and tensor bytes.

The file is not trusted. Every count, length and offset is compared with the bytes that are left before anything is
allocated or skipped, so memory use is bounded by a small multiple of the header's own size. Knows the container
format only; what the metadata says about a model is `gguf_model`'s business.
"""

import math
import struct
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from verispec.errors import ModelFileError, UnsupportedModelError
from verispec.model.blocks import FORMATS
from verispec.model.fields import quoted
from verispec.model.model_files import MappedFile, ModelFiles, TensorInfo, check_no_overlap

MAGIC = b"GGUF"

# Numeric arrays are read-only numpy arrays, arrays of strings are lists of str, arrays of arrays are lists.
MetadataValue: TypeAlias = "bool | int | float | str | npt.NDArray[Any] | list[Any]"

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: dict[int, struct.Struct] = {
    type_id: struct.Struct(code)
    for type_id, code in (
        (0, "<B"), (1, "<b"), (2, "<H"), (3, "<h"), (4, "<I"), (5, "<i"), (6, "<f"), (_BOOL, "<B"), (10, "<Q"),
        (11, "<q"), (12, "<d"),
    )
}  # fmt: skip
_U32, _U64 = _SCALARS[4], _SCALARS[10]

_FORMAT_BY_ID = {fmt.type_id: name for name, fmt in FORMATS.items()}
# What others are called, so that a refusal can say it.
_OTHER_TYPES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip

_MAX_ENTRIES = 1 << 16
_MAX_NAME_LEN = (1 << 16) - 1
_MAX_STRING_LEN = 1 << 24
_MAX_ARRAY_DEPTH = 4
_MAX_DIMS = 4
_MAX_ALIGNMENT = 1 << 16
_DEFAULT_ALIGNMENT = 32
# The least bytes an entry can take: they turn a claimed count into a claimed size.
_MIN_PAIR_NBYTES = 8 + 4 + 1
_MIN_TENSOR_NBYTES = 8 + 4 + 4 + 8
_MIN_NESTED_ARRAY_NBYTES = 4 + 8


class _Reader:
    """A cursor over the header that never moves past the end of the file."""

    def __init__(self, file: MappedFile) -> None:
        self.file, self.buffer, self.size, self.pos = file, file.buffer, file.size, 0

    def fail(self, problem: str) -> NoReturn:
        raise ModelFileError(f"{self.file.path}: {problem} (at byte {self.pos} of {self.size})")

    def check_room(self, nbytes: int, what: str) -> None:
        if nbytes > self.size - self.pos:
            self.fail(f"{what} needs {nbytes} bytes but {self.size - self.pos} are left")

    def number(self, kind: struct.Struct, what: str) -> Any:
        self.check_room(kind.size, what)
        (value,) = kind.unpack_from(self.buffer, self.pos)
        self.pos += kind.size
        return value

    def string(self, what: str, max_len: int = _MAX_STRING_LEN) -> str:
        length = self.number(_U64, what)
        if length > max_len:
            self.fail(f"{what} claims {length} bytes; the limit is {max_len}")
        self.check_room(length, what)
        raw = self.buffer[self.pos : self.pos + length]
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            self.fail(f"{what} is not UTF-8: {error.reason}")
        self.pos += length
        return text

    def value(self, type_id: int, what: str, depth: int = 0) -> MetadataValue:
        if type_id == _STRING:
            return self.string(what)
        if type_id == _ARRAY:
            return self._array(what, depth + 1)
        if type_id not in _SCALARS:
            self.fail(f"{what} has unknown value type {type_id}")
        value: int | float = self.number(_SCALARS[type_id], what)
        return bool(value) if type_id == _BOOL else value

    def _array(self, what: str, depth: int) -> MetadataValue:
        if depth > _MAX_ARRAY_DEPTH:
            self.fail(f"{what} nests arrays deeper than {_MAX_ARRAY_DEPTH}")
        type_id: int = self.number(_U32, what)
        count: int = self.number(_U64, what)
        if type_id == _STRING:
            self.check_room(count * _U64.size, f"{what} of {count} strings")
            return self._strings(count, what)
        if type_id == _ARRAY:
            self.check_room(count * _MIN_NESTED_ARRAY_NBYTES, f"{what} of {count} arrays")
            return [self._array(what, depth + 1) for _ in range(count)]
        if type_id not in _SCALARS:
            self.fail(f"{what} has unknown element type {type_id}")
        kind = _SCALARS[type_id]
        self.check_room(count * kind.size, f"{what} of {count} values")
        dtype = np.dtype(np.bool_ if type_id == _BOOL else kind.format)
        values = np.frombuffer(self.buffer[self.pos : self.pos + count * kind.size], dtype=dtype)
        self.pos += count * kind.size
        return values

    def _strings(self, count: int, what: str) -> list[str]:
        # `string` for token and merge lists, which have hundreds of thousands of entries.
        buffer, pos, size, length_at = self.buffer, self.pos, self.size, _U64.unpack_from
        starts, width = [pos], _U64.size
        try:
            for _ in range(count):
                (length,) = length_at(buffer, pos)
                pos += width + length
                if length > _MAX_STRING_LEN or pos > size:
                    self.fail(f"{what} holds a string that claims {length} bytes")
                starts.append(pos)
        except struct.error as error:
            self.fail(f"{what}: string {len(starts) - 1} of {count} cannot be read: {error}")
        first, self.pos = self.pos, pos
        with suppress(UnicodeDecodeError):
            texts = _joined(buffer[first:pos], np.array(starts[:-1], np.int64) - first).split("\0")[1:]
            if len(texts) == count:
                return texts
        texts = []
        for start, end in pairwise(starts):
            try:
                texts.append(buffer[start + width : end].decode())
            except UnicodeDecodeError as error:
                self.fail(f"{what}: string {len(texts)} of {count} cannot be read: {error}")
        return texts


def _joined(data: bytes, starts: npt.NDArray[np.int64]) -> str:
    """The strings at `starts` as one text, in which a zero character stands before each instead of its length."""
    values, is_text = np.frombuffer(data, np.uint8).copy(), np.ones(len(data), np.bool_)
    values[starts] = 0
    for i in range(1, _U64.size):
        is_text[starts + i] = False
    return values[is_text].tobytes().decode()


def open_gguf(path: Path) -> ModelFiles:
    """Map the file and read its header; tensor bytes are read when asked for."""
    reader = _Reader(MappedFile(path))
    num_tensors, num_pairs = _read_preamble(reader)
    metadata = _read_metadata(reader, num_pairs)
    tensors = _read_tensor_table(reader, num_tensors, _alignment(reader, metadata))
    return ModelFiles(path, [reader.file], metadata, tensors)


def _read_preamble(reader: _Reader) -> tuple[int, int]:
    if reader.buffer[:4] != MAGIC:
        reader.fail(f"not a GGUF file: it starts with {bytes(reader.buffer[:4])!r}")
    reader.pos = 4
    version: int = reader.number(_U32, "the version")
    if version not in (2, 3):
        byte_order = " (or big-endian)" if version & 0xFFFF == 0 else ""
        raise UnsupportedModelError(
            f"{reader.file.path}: GGUF version {version}{byte_order}; supported: versions 2 and 3, little-endian"
        )
    num_tensors: int = reader.number(_U64, "the tensor count")
    num_pairs: int = reader.number(_U64, "the metadata count")
    if max(num_tensors, num_pairs) > _MAX_ENTRIES:
        reader.fail(f"claims {num_pairs} metadata pairs and {num_tensors} tensors; the limit is {_MAX_ENTRIES} each")
    reader.check_room(
        num_pairs * _MIN_PAIR_NBYTES + num_tensors * _MIN_TENSOR_NBYTES,
        f"a header of {num_pairs} metadata pairs and {num_tensors} tensors",
    )
    return num_tensors, num_pairs


def _read_metadata(reader: _Reader, num_pairs: int) -> dict[str, MetadataValue]:
    metadata: dict[str, MetadataValue] = {}
    for i in range(num_pairs):
        key = reader.string(f"metadata key {i}", max_len=_MAX_NAME_LEN)
        if key in metadata:
            reader.fail(f"metadata key {quoted(key)} appears twice")
        what = f"metadata {quoted(key)}"
        metadata[key] = reader.value(reader.number(_U32, what), what)
    return metadata


def _alignment(reader: _Reader, metadata: dict[str, MetadataValue]) -> int:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 1 <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
        reader.fail(f"general.alignment must be a power of two up to {_MAX_ALIGNMENT}, not {quoted(alignment)}")
    return alignment


def _read_tensor_table(reader: _Reader, num_tensors: int, alignment: int) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for i in range(num_tensors):
        name = reader.string(f"name of tensor {i}", max_len=_MAX_NAME_LEN)
        if name in tensors:
            reader.fail(f"tensor {quoted(name)} appears twice")
        tensors[name] = _read_tensor_info(reader, name)
    # Offsets count from the first aligned byte after the table, which is known only now.
    base = -(-reader.pos // alignment) * alignment
    for name, info in tensors.items():
        end = base + info.offset + info.nbytes
        if info.offset % alignment:
            reader.fail(f"tensor {quoted(name)} starts at {info.offset}, which is not a multiple of {alignment}")
        if end > reader.size:
            reader.fail(f"tensor {quoted(name)} needs bytes up to {end}; the file is truncated")
        tensors[name] = info._replace(offset=base + info.offset)
    check_no_overlap(tensors, reader.file.path)
    return tensors


def _read_tensor_info(reader: _Reader, name: str) -> TensorInfo:
    what = f"tensor {quoted(name)}"
    num_dims: int = reader.number(_U32, what)
    if not 1 <= num_dims <= _MAX_DIMS:
        reader.fail(f"{what} has {num_dims} dimensions; allowed: 1 to {_MAX_DIMS}")
    dims = [reader.number(_U64, what) for _ in range(num_dims)]  # innermost first in the file
    type_id: int = reader.number(_U32, what)
    offset: int = reader.number(_U64, what)
    if type_id not in _FORMAT_BY_ID:
        found = _OTHER_TYPES.get(type_id, f"unknown type {type_id}")
        raise UnsupportedModelError(f"{reader.file.path}: {what} is stored as {found}; supported: {', '.join(FORMATS)}")
    type_name = _FORMAT_BY_ID[type_id]
    fmt = FORMATS[type_name]
    if dims[0] % fmt.block_len:
        reader.fail(f"{what}: rows of {dims[0]} values are not whole {type_name} blocks of {fmt.block_len}")
    nbytes = math.prod(dims) // fmt.block_len * fmt.block_nbytes
    if not 1 <= nbytes <= reader.size:
        reader.fail(f"{what} of dimensions {dims} would take {nbytes} bytes of the file")
    return TensorInfo(reader.file, type_name, tuple(reversed(dims)), offset, nbytes)
