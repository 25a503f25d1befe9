"""Which model was loaded: what it is called, and the digests of its files, made when they are first asked for.

Hashing reads every byte, which loading should not wait for; so the files are read again later, and refused unless the
file system says that nothing was done to them since they were opened. What was loaded is no view of them: a change that
comes after the digests changes no answer.
"""

from dataclasses import dataclass
from functools import cached_property

from verispec.errors import ModelFileError
from verispec.model.checkpoint import Checkpoint
from verispec.model.file_digest import FileDigest, FileStamp


@dataclass(frozen=True)
class ModelIdentity:
    """A loaded model. `name` is a known name, a hub id, or a file's or folder's own name without directories."""

    name: str
    stamps: tuple[FileStamp, ...]

    @classmethod
    def of(cls, checkpoint: Checkpoint, *, name: str) -> "ModelIdentity":
        return cls(name, checkpoint.stamps())

    @cached_property
    def files(self) -> tuple[FileDigest, ...]:
        return tuple(map(_digest, self.stamps))


def _digest(loaded: FileStamp) -> FileDigest:
    """The digest of the file as it was loaded; `loaded` is from before its first byte was read."""
    try:
        digest = FileDigest.of(loaded.path)
        now = FileStamp.of(loaded.path, loaded.path.stat())
    except OSError as error:
        raise ModelFileError(f"{loaded.path}: cannot be read: {error}") from error
    if now != loaded:
        raise ModelFileError(f"{loaded.path}: has changed since it was loaded; load it again")
    return digest
