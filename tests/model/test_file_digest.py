"""Digests of model files: what identifies a file, and where two differ."""

import hashlib
from pathlib import Path

import pytest

from tests.support.tiny_models import TinyConfig, write_folder, write_gguf
from verispec.errors import ModelFileError
from verispec.model import file_digest, open_checkpoint
from verispec.model.file_digest import ByteRange, FileContent, FileDigest, differing_ranges
from verispec.model.hub import REGISTRY, label
from verispec.model.identity import ModelIdentity


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_digest, "BLOCK_NBYTES", 10)


def digest(data: bytes, name: str = "f") -> FileDigest:
    return FileDigest.of(FileContent(Path("folder") / name, memoryview(data)))


def test_a_digest_has_every_block() -> None:
    data = bytes(range(25))
    blocks = tuple(hashlib.sha256(data[i : i + 10]).hexdigest()[:16] for i in (0, 10, 20))
    assert digest(data) == FileDigest("f", 25, hashlib.sha256(data).hexdigest(), blocks)
    assert digest(b"").blocks == ()
    assert digest(data).has_same_bytes(digest(data, "other"))
    assert not digest(data).has_same_bytes(digest(data[:-1]))


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
def test_differences_are_located_by_block(other: bytes, ranges: list[tuple[int, int]]) -> None:
    assert differing_ranges(digest(bytes(45)), digest(other)) == [ByteRange(*r) for r in ranges]
    assert differing_ranges(digest(other), digest(bytes(45))) == [ByteRange(*r) for r in ranges]


def test_every_file_that_decides_what_is_computed_has_a_digest(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", TinyConfig())
    (only,) = open_checkpoint(tmp_path / "m.gguf").file_digests()
    assert (only.name, only.nbytes) == ("m.gguf", (tmp_path / "m.gguf").stat().st_size)
    write_folder(tmp_path / "folder", TinyConfig(), num_shards=2)
    files = open_checkpoint(tmp_path / "folder").file_digests()
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
    with open_checkpoint("folder") as checkpoint:
        early, late = (ModelIdentity.of(checkpoint, name="x") for _ in range(2))
    monkeypatch.chdir("/")
    assert early.files == open_checkpoint(tmp_path / "folder").file_digests()
    (tmp_path / "folder" / "config.json").write_text((tmp_path / "folder" / "config.json").read_text() + "\n")
    assert len(early.files) == 2  # computed once
    with pytest.raises(ModelFileError, match="has changed since it was loaded"):
        _ = late.files


def test_labels_say_nothing_of_directories(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.touch()
    assert label(path, path) == label(str(path), path) == "m.gguf"
    assert label(".", Path()) == Path.cwd().name
    assert label("org/name", tmp_path / "snapshot") == "org/name"
    (known,) = REGISTRY.values()
    assert label(known.name, tmp_path / known.file_name) == known.name
    assert label(tmp_path / known.file_name, tmp_path / known.file_name) == known.name
