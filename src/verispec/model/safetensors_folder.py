"""Reads a Hugging Face model folder: config.json, and the tensors of one or several safetensors files.

The files are not trusted: lengths, offsets and JSON nesting are checked before they are used, and the shard index may
name only files of the same folder. Knows the container format; what config.json says about a model is
`folder_model`'s business.
"""

import math
from pathlib import Path
from typing import Any, TypeGuard

from verispec.errors import ModelFileError, UnsupportedModelError
from verispec.model.fields import json_object, quoted
from verispec.model.model_files import MappedFile, ModelFiles, TensorInfo, check_no_overlap

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

# safetensors' name of a type is ggml's as well, for these.
_ITEM_NBYTES = {"F32": 4, "F16": 2, "BF16": 2}

_MAX_JSON_NBYTES = 1 << 25
_MAX_DIMS = 8
_MAX_SHARDS = 512


def open_folder(path: Path) -> ModelFiles:
    """Open a model folder, or one .safetensors file that has its config.json beside it."""
    if path.is_file():
        return _open(path.parent, [path.name])
    if (path / INDEX_NAME).is_file():
        placed = _weight_map(MappedFile(path / INDEX_NAME))
        files = _open(path, sorted(set(placed.values())))
        for name in placed.keys() | files.tensors.keys():
            said = placed.get(name)
            found = files.tensors[name].file.path.name if name in files.tensors else None
            if said != found:
                raise ModelFileError(
                    f"{path / INDEX_NAME}: tensor {quoted(name)} is listed in {said} but found in {found}"
                )
        return files
    if (path / WEIGHTS_NAME).is_file() or not (path / CONFIG_NAME).is_file():
        return _open(path, [WEIGHTS_NAME])
    raise ModelFileError(f"{path}: has neither {WEIGHTS_NAME} nor {INDEX_NAME}")


def _open(folder: Path, names: list[str]) -> ModelFiles:
    config = MappedFile(folder / CONFIG_NAME)
    files = [MappedFile(folder / name) for name in names]
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for name, info in _read_header(file).items():
            if name in tensors:
                raise ModelFileError(f"{file.path}: tensor {quoted(name)} is also in {tensors[name].file.path.name}")
            tensors[name] = info
    return ModelFiles(folder, [config, *files], _object(config), tensors)


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


def _read_header(file: MappedFile) -> dict[str, TensorInfo]:
    if file.size < 8:
        raise ModelFileError(f"{file.path}: {file.size} bytes are too few for a safetensors file")
    header_nbytes = int.from_bytes(file.buffer[:8], "little")
    if header_nbytes > min(file.size - 8, _MAX_JSON_NBYTES):
        raise ModelFileError(f"{file.path}: the header claims {header_nbytes} bytes of a file of {file.size}")
    base = 8 + header_nbytes
    header = json_object(file.buffer[8:base], file.path, max_nbytes=_MAX_JSON_NBYTES)
    header.pop("__metadata__", None)
    tensors = {name: _parse_entry(file, base, name, entry) for name, entry in header.items()}
    check_no_overlap(tensors, file.path)
    return tensors


def _parse_entry(file: MappedFile, base: int, name: str, entry: object) -> TensorInfo:
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
    return TensorInfo(file, type_name, tuple(shape), base + start, nbytes)


def _is_size_list(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)
