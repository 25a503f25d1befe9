"""Which model was loaded: what it is called, and the digests of its files, made when they are first asked for.

Hashing reads every byte, which loading should not wait for; so the files are opened again later, and refused if they
are not the ones that were loaded any more.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from verispec.errors import ModelFileError
from verispec.model.checkpoint import Checkpoint, FileStamp, open_checkpoint
from verispec.model.file_digest import FileDigest


@dataclass(frozen=True)
class ModelIdentity:
    """A loaded model. `name` is a known name, a hub id, or a file's or folder's own name without directories."""

    name: str
    path: Path
    stamps: tuple[FileStamp, ...]

    @classmethod
    def of(cls, checkpoint: Checkpoint, *, name: str) -> "ModelIdentity":
        """The identity of an open checkpoint; reads nothing."""
        return cls(name, checkpoint.path.absolute(), checkpoint.stamps())

    @cached_property
    def files(self) -> tuple[FileDigest, ...]:
        """The digests of the model's files, computed once."""
        with open_checkpoint(self.path) as checkpoint:
            digests = checkpoint.file_digests()
            if checkpoint.stamps() != self.stamps:
                raise ModelFileError(f"{self.path}: has changed since it was loaded; load it again")
        return digests
