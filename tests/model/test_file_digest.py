"""Digests of model files: what identifies a file, and where two differ."""

import hashlib
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.tiny_models import TinyConfig, write_folder, write_gguf
from verispec.errors import ModelFileError
from verispec.model import file_digest, open_checkpoint
from verispec.model.file_digest import ByteRange, FileDigest, ModelIdentity, differing_ranges
from verispec.model.hub import REGISTRY, label


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_digest, "BLOCK_NBYTES", 10)


def identity(path: str | Path) -> ModelIdentity:
    with open_checkpoint(path) as checkpoint:
        return ModelIdentity("x", checkpoint.stamps())


def digest(folder: Path, data: bytes, name: str = "f") -> FileDigest:
    (folder / name).write_bytes(data)
    return FileDigest.of(folder / name)


def test_a_digest_has_every_block(tmp_path: Path) -> None:
    data = bytes(range(25))
    blocks = tuple(f"{zlib.crc32(data[i : i + 10]):08x}" for i in (0, 10, 20))
    assert digest(tmp_path, data) == FileDigest("f", 25, hashlib.sha256(data).hexdigest(), blocks)
    assert digest(tmp_path, b"").blocks == ()
    assert digest(tmp_path, data).has_same_bytes(digest(tmp_path, data, "other"))
    assert not digest(tmp_path, data).has_same_bytes(digest(tmp_path, data[:-1]))


@pytest.mark.parametrize(
    ("other", "ranges"),
    [
        (bytes(45), []),
        (b"\1" + bytes(44), [(0, 10)]),
        (bytes(44) + b"\1", [(40, 45)]),
        (bytes(9) + b"\1\1" + bytes(34), [(0, 20)]),
        (b"\1" + bytes(29) + b"\1" + bytes(14), [(0, 10), (30, 40)]),
        (bytes(44), [(40, 45)]),
        (bytes(62), [(40, 62)]),
        (b"", [(0, 45)]),
    ],
)
def test_differences_are_located_by_block(tmp_path: Path, other: bytes, ranges: list[tuple[int, int]]) -> None:
    one, two = digest(tmp_path, bytes(45)), digest(tmp_path, other)
    assert differing_ranges(one, two) == differing_ranges(two, one) == [ByteRange(*r) for r in ranges]


def test_every_file_that_decides_what_is_computed_has_a_digest(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", TinyConfig())
    (only,) = identity(tmp_path / "m.gguf").files
    assert (only.name, only.nbytes) == ("m.gguf", (tmp_path / "m.gguf").stat().st_size)
    write_folder(tmp_path / "folder", TinyConfig(), num_shards=2)
    files = identity(tmp_path / "folder").files
    assert [f.name for f in files] == [
        "config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
    ]  # fmt: skip
    for file in files:
        assert file.sha256 == hashlib.sha256((tmp_path / "folder" / file.name).read_bytes()).hexdigest()


def test_files_are_hashed_on_demand_and_refused_if_they_are_others_by_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path / "folder", TinyConfig())
    monkeypatch.chdir(tmp_path)
    early, late = identity("folder"), identity("folder")
    monkeypatch.chdir("/")
    assert early.files == identity(tmp_path / "folder").files
    (tmp_path / "folder" / "config.json").write_text((tmp_path / "folder" / "config.json").read_text() + "\n")
    assert len(early.files) == 2  # computed once
    with pytest.raises(ModelFileError, match="has changed since it was loaded"):
        _ = late.files


def edit_in_place(path: Path) -> None:
    """Change the last byte; size and time of modification are as before."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-1, 2)
        (last,) = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def put_another_in_its_place(path: Path) -> None:
    other = Path(shutil.copy2(path, path.with_name("other")))
    other.replace(path)


def put_another_there_while_it_is_hashed(path: Path) -> None:
    """The file itself is as it was, but not at its place for a while."""
    path.rename(path.with_name("hidden"))
    path.with_name("hidden").rename(path)


@pytest.mark.parametrize(
    "change", [edit_in_place, put_another_in_its_place, put_another_there_while_it_is_hashed, Path.unlink]
)
@pytest.mark.parametrize("name", ["m.gguf", "config.json", "model.safetensors"])
def test_a_file_that_was_touched_since_it_was_opened_is_never_named(
    tmp_path: Path, name: str, change: Callable[[Path], None]
) -> None:
    write_gguf(tmp_path / "m.gguf", TinyConfig())
    write_folder(tmp_path / "folder", TinyConfig())
    path = tmp_path / name if name == "m.gguf" else tmp_path / "folder" / name
    with open_checkpoint(path if name == "m.gguf" else path.parent) as checkpoint:
        wait_for_another_time(tmp_path)
        change(path)
        loaded = ModelIdentity("x", checkpoint.stamps())
    with pytest.raises(ModelFileError, match=r"has changed since|cannot be read"):
        _ = loaded.files


def wait_for_another_time(folder: Path) -> None:
    """Until the file system, whose clock ticks slowly, gives a new file another time."""
    (folder / "first").touch()
    while True:
        (folder / "next").touch()
        if (folder / "next").stat().st_ctime_ns != (folder / "first").stat().st_ctime_ns:
            return


def test_labels_say_nothing_of_directories(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.touch()
    assert label(path, path) == label(str(path), path) == "m.gguf"
    assert label(".", Path()) == Path.cwd().name
    assert label("org/name", tmp_path / "snapshot") == "org/name"
    (known,) = REGISTRY.values()
    assert label(known.name, tmp_path / known.file_name) == known.name
    assert label(tmp_path / known.file_name, tmp_path / known.file_name) == known.name
