"""The files of one model, mapped into memory read-only, and its tensors under the files' own names.

The operating system's refusals become `ModelFileError`. A mapping lives until the last array made from it is gone, so
arrays stay valid after `close`. Both formats end up here; reading their headers is up to `gguf_file` and
`safetensors_folder`.
"""

import mmap
import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from verispec.errors import ModelFileError
from verispec.model.blocks import StoredTensor, to_float32
from verispec.model.fields import quoted
from verispec.model.file_digest import FileStamp


class MappedFile:
    """The bytes of one file. `buffer` is what parsers index; `bytes_at` makes arrays that copy nothing.

    `stamp` is of the file that was opened, from before its first byte was read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.stamp = FileStamp.of(path, os.fstat(file.fileno()))
                self.size = file.seek(0, 2)
                # An empty file cannot be mapped.
                self.buffer: mmap.mmap | bytes = (
                    mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_READ) if self.size else b""
                )
        except (OSError, ValueError) as error:
            raise ModelFileError(f"{path}: cannot be read: {error}") from error

    def bytes_at(self, start: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """A read-only view of bytes that the caller has checked to be inside the file.

        What was read before leaves this process's memory, though not the system's cache: whoever goes through a model
        tensor by tensor holds one of them at a time. Older views stay valid.
        """
        if start + nbytes > len(self.buffer):
            raise ModelFileError(f"{self.path}: is closed")
        if isinstance(self.buffer, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            self.buffer.madvise(mmap.MADV_DONTNEED)
        return np.frombuffer(self.buffer, dtype=np.uint8, count=nbytes, offset=start)

    def close(self) -> None:
        """Drop this object's hold on the mapping; reading through it afterwards is an error."""
        self.buffer = b""


class TensorInfo(NamedTuple):
    """Where a tensor lies. `shape` is in numpy's order, outermost dimension first."""

    file: MappedFile
    type_name: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class ModelFiles:
    """Open files: a GGUF file and its metadata, or a folder of safetensors files and its config.json."""

    def __init__(
        self, path: Path, files: Sequence[MappedFile], metadata: dict[str, Any], tensors: dict[str, TensorInfo]
    ) -> None:
        self.path = path
        self.metadata: Mapping[str, Any] = MappingProxyType(metadata)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(tensors)
        self._files = files

    def stored(self, name: str) -> StoredTensor:
        """The tensor's bytes [..., bytes of one innermost row], a read-only view of the file, and their type."""
        if name not in self.tensors:
            raise ModelFileError(f"{self.path}: has no tensor {name!r}")
        info = self.tensors[name]
        data = info.file.bytes_at(info.offset, info.nbytes).reshape(*info.shape[:-1], -1)
        return StoredTensor(info.type_name, data)

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor's values; a read-only view of the file where it holds float32 already."""
        stored = self.stored(name)
        return to_float32(stored.data, stored.type_name)

    def stamps(self) -> tuple[FileStamp, ...]:
        """Those of config.json and of every weight file, these in the order of their names; or that of the one file."""
        return tuple(file.stamp for file in self._files)

    def close(self) -> None:
        for file in self._files:
            file.close()

    def __enter__(self) -> "ModelFiles":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def check_no_overlap(tensors: Mapping[str, TensorInfo], path: Path) -> None:
    """Refuse tensors that share bytes: no writer makes them, and each byte should mean one thing."""
    ordered = sorted((info.offset, info.offset + info.nbytes, name) for name, info in tensors.items())
    for (_, end, name), (start, _, other) in pairwise(ordered):
        if start < end:
            raise ModelFileError(f"{path}: tensors {quoted(name)} and {quoted(other)} overlap at byte {start}")
