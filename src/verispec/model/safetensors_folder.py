"""Reads a Hugging Face model folder: config.json, and the tensors of one or several safetensors files.

The files are not trusted: lengths, offsets and JSON nesting are checked before they are used, and the shard index may
name only files of the same folder. Knows the container format; what config.json says about a model is
`folder_model`'s business. Values come out as float32, whatever they are stored as.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from verispec.errors import ModelFileError, UnsupportedModelError
from verispec.model.blocks import to_float32
from verispec.model.fields import json_object, quoted
from verispec.model.file_digest import FileStamp
from verispec.model.mapped_file import MappedFile, Span, check_no_overlap

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

# safetensors' name of a type is ggml's as well, for these.
_ITEM_NBYTES = {"F32": 4, "F16": 2, "BF16": 2}

_MAX_JSON_NBYTES = 1 << 25
_MAX_DIMS = 8
_MAX_SHARDS = 512


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies: which of the folder's files, and which of its bytes."""

    file: MappedFile
    type_name: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class SafetensorsFolder:
    """An open model folder. Arrays from `read` stay valid after `close`."""

    def __init__(self, folder: Path, config: MappedFile, files: list[MappedFile]) -> None:
        self.folder = folder
        self._files = [config, *files]
        self.config: Mapping[str, Any] = MappingProxyType(_object(config))
        self.tensors: Mapping[str, StoredTensor] = MappingProxyType(_merge([_read_header(file) for file in files]))

    @classmethod
    def open(cls, path: str | Path) -> "SafetensorsFolder":
        """Open a model folder, or one .safetensors file that has its config.json beside it."""
        path = Path(path)
        if path.is_file():
            return cls(path.parent, MappedFile(path.parent / CONFIG_NAME), [MappedFile(path)])
        config = MappedFile(path / CONFIG_NAME)
        if (path / INDEX_NAME).is_file():
            return cls._open_sharded(path, config)
        if (path / WEIGHTS_NAME).is_file():
            return cls(path, config, [MappedFile(path / WEIGHTS_NAME)])
        raise ModelFileError(f"{path}: has neither {WEIGHTS_NAME} nor {INDEX_NAME}")

    @classmethod
    def _open_sharded(cls, path: Path, config: MappedFile) -> "SafetensorsFolder":
        index_path = path / INDEX_NAME
        placed = _weight_map(MappedFile(index_path))
        folder = cls(path, config, [MappedFile(path / name) for name in sorted(set(placed.values()))])
        for name in placed.keys() | folder.tensors.keys():
            said = placed.get(name)
            found = folder.tensors[name].file.path.name if name in folder.tensors else None
            if said != found:
                raise ModelFileError(f"{index_path}: tensor {quoted(name)} is listed in {said} but found in {found}")
        return folder

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor's values; a read-only view of the file where it holds float32 already."""
        if name not in self.tensors:
            raise ModelFileError(f"{self.folder}: has no tensor {name!r}")
        stored = self.tensors[name]
        flat = stored.file.bytes_at(stored.offset, stored.nbytes)
        return to_float32(flat, stored.type_name).reshape(stored.shape)

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        stored = self.tensors[name]
        return stored.file.bytes_at(stored.offset, stored.nbytes).reshape(stored.shape[0], -1)

    def stamps(self) -> list[FileStamp]:
        """Those of config.json and of every weight file, these in the order of their names."""
        return [file.stamp for file in self._files]

    def close(self) -> None:
        """Release the files; each is unmapped when the last array from `read` that needs it is gone."""
        for file in self._files:
            file.close()

    def __enter__(self) -> "SafetensorsFolder":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _object(file: MappedFile) -> dict[str, Any]:
    if file.size > _MAX_JSON_NBYTES:
        raise ModelFileError(f"{file.path}: {file.size} bytes of JSON; the limit is {_MAX_JSON_NBYTES}")
    return json_object(file.buffer[:], file.path, max_nbytes=_MAX_JSON_NBYTES)


def _weight_map(index: MappedFile) -> dict[str, str]:
    where, placed = index.path, _object(index).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise ModelFileError(f"{where}: weight_map must be a non-empty object")
    for name, file_name in placed.items():
        if not isinstance(file_name, str) or not _is_plain_name(file_name):
            raise ModelFileError(
                f"{where}: tensor {quoted(name)} is placed in {quoted(file_name)}; "
                "allowed: .safetensors files of this folder"
            )
    if len(set(placed.values())) > _MAX_SHARDS:
        raise ModelFileError(f"{where}: more than {_MAX_SHARDS} shards")
    return placed


def _is_plain_name(name: str) -> bool:
    # A colon would name a drive or a stream on Windows.
    return name.endswith(".safetensors") and not name.startswith(".") and not set(name) & set("/\\:\0")


def _read_header(file: MappedFile) -> dict[str, StoredTensor]:
    if file.size < 8:
        raise ModelFileError(f"{file.path}: {file.size} bytes are too few for a safetensors file")
    header_nbytes = int.from_bytes(file.buffer[:8], "little")
    if header_nbytes > min(file.size - 8, _MAX_JSON_NBYTES):
        raise ModelFileError(f"{file.path}: the header claims {header_nbytes} bytes of a file of {file.size}")
    base = 8 + header_nbytes
    header = json_object(file.buffer[8:base], file.path, max_nbytes=_MAX_JSON_NBYTES)
    header.pop("__metadata__", None)
    tensors = {name: _parse_entry(file, base, name, entry) for name, entry in header.items()}
    check_no_overlap([Span(t.offset, t.offset + t.nbytes, name) for name, t in tensors.items()], file.path)
    return tensors


def _parse_entry(file: MappedFile, base: int, name: str, entry: object) -> StoredTensor:
    where = f"{file.path}: tensor {quoted(name)}"
    if not isinstance(entry, dict) or not isinstance(type_name := entry.get("dtype"), str):
        raise ModelFileError(f"{where} has no dtype")
    if type_name not in _ITEM_NBYTES:
        found = quoted(type_name).strip("'")
        raise UnsupportedModelError(f"{where} is stored as {found}; supported: {', '.join(_ITEM_NBYTES)}")
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not _is_size_list(shape) or len(shape) > _MAX_DIMS or not all(shape):
        raise ModelFileError(f"{where} has shape {quoted(shape)}; allowed: up to {_MAX_DIMS} positive sizes")
    if not _is_size_list(offsets) or len(offsets) != 2:
        raise ModelFileError(f"{where} has data_offsets {quoted(offsets)}; expected two byte positions")
    start, end = offsets
    nbytes = math.prod(shape) * _ITEM_NBYTES[type_name]
    if end - start != nbytes:
        raise ModelFileError(f"{where}: {end - start} bytes for shape {shape} of {type_name}, which needs {nbytes}")
    if base + end > file.size:
        raise ModelFileError(f"{where} needs bytes up to {base + end} but the file has {file.size}; it is truncated")
    return StoredTensor(file, type_name, tuple(shape), base + start, nbytes)


def _is_size_list(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


def _merge(headers: list[dict[str, StoredTensor]]) -> dict[str, StoredTensor]:
    merged: dict[str, StoredTensor] = {}
    for header in headers:
        for name, stored in header.items():
            if name in merged:
                raise ModelFileError(
                    f"{stored.file.path}: tensor {quoted(name)} is also in {merged[name].file.path.name}"
                )
            merged[name] = stored
    return merged
