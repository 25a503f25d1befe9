"""Opens a model of either format and serves its weights, all of them finite, under verispec's names.

All tensors are matched against the architecture when the checkpoint is opened, from the headers alone: a missing,
misshapen or unknown tensor is reported before anything large is read. Knows nothing of backends or tokenizers.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from verispec.errors import InputError, ModelFileError, UnsupportedModelError
from verispec.model.architecture import Architecture, expected_tensors, format_shape
from verispec.model.blocks import StoredTensor
from verispec.model.fields import quoted
from verispec.model.file_digest import FileStamp
from verispec.model.folder_model import FolderWeights
from verispec.model.gguf_file import MAGIC, GGUFFile
from verispec.model.gguf_model import GGUFWeights
from verispec.model.safetensors_folder import SafetensorsFolder


@dataclass(frozen=True, slots=True)
class GGUFTokenizerSource:
    """The tokenizer is in the metadata of this GGUF file, under the keys tokenizer.*"""

    path: Path
    metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class FolderTokenizerSource:
    """The tokenizer is in files of this folder: tokenizer.json, tokenizer_config.json."""

    folder: Path


TokenizerSource: TypeAlias = GGUFTokenizerSource | FolderTokenizerSource


class Weights(Protocol):
    """One file format's side of a checkpoint.

    `shapes` has every tensor in the files by the files' own names; those of them in `ignored` need not be used.
    """

    location: str
    architecture: Architecture
    shapes: dict[str, tuple[int, ...]]
    ignored: frozenset[str]

    def stored_name(self, name: str) -> str: ...

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """The values of a tensor, by verispec's name, in verispec's layout."""
        ...

    def stored(self, name: str) -> StoredTensor:
        """A matrix as the files have it, its rows in verispec's order."""
        ...

    def file_of(self, name: str) -> Path: ...

    def stamps(self) -> Sequence[FileStamp]:
        """What was opened: every file that decides what the model computes."""
        ...

    def close(self) -> None: ...


class Checkpoint:
    def __init__(self, path: Path, weights: Weights, tokenizer_source: TokenizerSource) -> None:
        self.path = path
        self.architecture = weights.architecture
        self.tokenizer_source = tokenizer_source
        self._weights = weights
        try:
            expected = expected_tensors(weights.architecture)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{weights.location}: {error}") from error
        self._shapes = {name: spec.shape for name, spec in expected.items()}
        _check_tensors(weights, self._shapes)

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor's values, C-contiguous, apart from the file, which may change."""
        if name not in self._shapes:
            raise InputError(f"{name!r} is not a tensor of this model; see expected_tensors")
        values = self._weights.read(name)
        # NaN and infinity both survive min or max, which need no array of flags beside the weights.
        if not (np.isfinite(values.min()) and np.isfinite(values.max())):
            self._refuse_not_finite(name, values)
        return values if values.flags.writeable else values.copy()

    def stored(self, name: str) -> StoredTensor:
        """A matrix as the files have it: for backends that compute on its own blocks. Nothing is checked for NaN."""
        return self._weights.stored(name)

    def _refuse_not_finite(self, name: str, values: npt.NDArray[np.float32]) -> NoReturn:
        row = next(i for i in np.ndindex(values.shape[:-1]) if not np.isfinite(values[i]).all())
        column = int(np.isfinite(values[row]).argmin())
        raise ModelFileError(
            f"{self._weights.file_of(name)}: tensor {quoted(self._weights.stored_name(name))} holds "
            f"{values[(*row, column)]} at index {format_shape((*row, column))}"
        )

    def stamps(self) -> tuple[FileStamp, ...]:
        return tuple(self._weights.stamps())

    def close(self) -> None:
        self._weights.close()

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
            folder = SafetensorsFolder.open(path)
            return Checkpoint(path, FolderWeights(folder), FolderTokenizerSource(folder.folder))
        if _starts_with_magic(path):
            file = GGUFFile.open(path)
            return Checkpoint(path, GGUFWeights(file), GGUFTokenizerSource(path, file.metadata))
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


def _check_tensors(weights: Weights, expected: Mapping[str, tuple[int, ...]]) -> None:
    stored_names = {weights.stored_name(name): shape for name, shape in expected.items()}
    for stored_name, shape in stored_names.items():
        found = weights.shapes.get(stored_name)
        if found is None:
            raise ModelFileError(f"{weights.location}: tensor {stored_name!r} {format_shape(shape)} is missing")
        if found != shape:
            raise ModelFileError(
                f"{weights.location}: tensor {stored_name!r} has shape {format_shape(found)}, "
                f"expected {format_shape(shape)}"
            )
    if unknown := sorted(weights.shapes.keys() - stored_names.keys() - weights.ignored):
        raise UnsupportedModelError(
            f"{weights.location}: {len(unknown)} unknown tensors, first {quoted(unknown[0])}; supported: those of "
            f"{weights.architecture.family} models"
        )
