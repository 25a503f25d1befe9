"""Opens a model of either format and serves its weights, all of them finite, under verispec's names.

All tensors are matched against the architecture when the checkpoint is opened, from the headers alone: a missing,
misshapen or unknown tensor is reported before anything large is read. Knows nothing of backends or tokenizers.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from verispec.errors import InputError, ModelFileError, UnsupportedModelError
from verispec.model.architecture import expected_tensors, format_shape
from verispec.model.blocks import StoredTensor
from verispec.model.fields import quoted
from verispec.model.file_digest import FileStamp
from verispec.model.folder_model import describe_folder
from verispec.model.gguf_file import MAGIC, open_gguf
from verispec.model.gguf_model import describe_gguf
from verispec.model.model_files import ModelFiles
from verispec.model.safetensors_folder import open_folder
from verispec.model.tensor_names import Description

T = TypeVar("T", bound=np.generic)


class GGUFTokenizerSource(NamedTuple):
    """The tokenizer is in the metadata of this GGUF file, under the keys tokenizer.*"""

    path: Path
    metadata: Mapping[str, Any]


class FolderTokenizerSource(NamedTuple):
    """The tokenizer is in files of this folder: tokenizer.json, tokenizer_config.json."""

    folder: Path


TokenizerSource: TypeAlias = GGUFTokenizerSource | FolderTokenizerSource


class Checkpoint:
    def __init__(self, path: Path, files: ModelFiles, description: Description, source: TokenizerSource) -> None:
        self.path = path
        self.architecture = description.architecture
        self.tokenizer_source = source
        self._files, self._description = files, description
        try:
            expected = expected_tensors(self.architecture)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{files.path}: {error}") from error
        _check_tensors(files, description, {name: spec.shape for name, spec in expected.items()})
        self._names = {name: description.stored_name(name) for name in expected}

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor's values, C-contiguous, apart from the file, which may change."""
        if name not in self._names:
            raise InputError(f"{name!r} is not a tensor of this model; see expected_tensors")
        values = self._ordered(name, self._files.read(self._names[name]))
        if name.endswith("norm") and self._description.norm_offset:
            values = values + np.float32(self._description.norm_offset)
        # NaN and infinity both survive min or max, which need no array of flags beside the weights.
        if not (np.isfinite(values.min()) and np.isfinite(values.max())):
            self._refuse_not_finite(name, values)
        return values if values.flags.writeable else values.copy()

    def stored(self, name: str) -> StoredTensor:
        """A matrix as the files have it, its rows in verispec's order: for backends that compute on its own blocks.

        Nothing is checked for NaN.
        """
        stored = self._files.stored(self._names[name])
        return stored._replace(data=self._ordered(name, stored.data))

    def _ordered(self, name: str, rows: npt.NDArray[T]) -> npt.NDArray[T]:
        """The rows of q and k in half-split order, as they are of everything else."""
        num_heads = {"q": self.architecture.num_heads, "k": self.architecture.num_kv_heads}.get(name.split(".")[-1])
        if num_heads is None or not self._description.has_interleaved_heads:
            return rows
        # Within a head the file interleaves the halves: its row 2i is row i, its row 2i + 1 is row i + head_dim / 2.
        num_rows, width = rows.shape
        pairs = rows.reshape(num_heads, num_rows // num_heads // 2, 2, width)
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(num_rows, width)

    def _refuse_not_finite(self, name: str, values: npt.NDArray[np.float32]) -> NoReturn:
        row = next(i for i in np.ndindex(values.shape[:-1]) if not np.isfinite(values[i]).all())
        column = int(np.isfinite(values[row]).argmin())
        stored_name = self._names[name]
        raise ModelFileError(
            f"{self._files.tensors[stored_name].file.path}: tensor {quoted(stored_name)} holds "
            f"{values[(*row, column)]} at index {format_shape((*row, column))}"
        )

    def stamps(self) -> tuple[FileStamp, ...]:
        """What was opened: every file that decides what the model computes."""
        return self._files.stamps()

    def close(self) -> None:
        self._files.close()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a GGUF file, a Hugging Face model folder, or one .safetensors file of such a folder."""
    path = Path(path)
    if not os.path.exists(path):
        raise ModelFileError(f"{path}: no such file or folder")
    if not (path.is_dir() or path.is_file()):
        raise ModelFileError(f"{path}: neither a file nor a folder")  # reading a pipe would wait for ever
    try:
        if path.is_dir() or path.suffix == ".safetensors":
            files = open_folder(path)
            return Checkpoint(path, files, describe_folder(files), FolderTokenizerSource(files.path))
        if _starts_with_magic(path):
            files = open_gguf(path)
            return Checkpoint(path, files, describe_gguf(files), GGUFTokenizerSource(path, files.metadata))
    except InputError as error:
        # The sizes a file claims were refused by `Architecture`.
        raise ModelFileError(f"{path}: {error}") from error
    raise UnsupportedModelError(f"{path}: not a model file verispec reads; supported: GGUF, safetensors folders")


def _starts_with_magic(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path}: cannot be read: {error}") from error


def _check_tensors(files: ModelFiles, description: Description, expected: Mapping[str, tuple[int, ...]]) -> None:
    stored_names = {description.stored_name(name): shape for name, shape in expected.items()}
    for name, shape in stored_names.items():
        found = files.tensors.get(name)
        if found is None:
            raise ModelFileError(f"{files.path}: tensor {name!r} {format_shape(shape)} is missing")
        if found.shape != shape:
            raise ModelFileError(
                f"{files.path}: tensor {name!r} has shape {format_shape(found.shape)}, expected {format_shape(shape)}"
            )
    if unknown := sorted(files.tensors.keys() - stored_names.keys() - description.ignored):
        raise UnsupportedModelError(
            f"{files.path}: {len(unknown)} unknown tensors, first {quoted(unknown[0])}; supported: those of "
            f"{description.architecture.family} models"
        )
