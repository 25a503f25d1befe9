"""The safetensors reader: round trips, and that no folder can make it fail in any way but its own."""

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.scale import scaled
from tests.support.tiny_models import (
    FOLDER_TYPES,
    TinyConfig,
    hf_name,
    write_folder,
    write_safetensors_parts,
)
from verispec.errors import ModelFileError, UnsupportedModelError
from verispec.model.safetensors_folder import open_folder

SMALL = TinyConfig(num_layers=1, hidden_size=32, num_heads=2, num_kv_heads=1, mlp_size=32, vocab_size=8)
GOOD_ENTRY = {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]}
INDEX = "model.safetensors.index.json"


def folder_with_header(tmp_path: Path, header: Any, body: bytes = bytes(64)) -> Path:
    (tmp_path / "config.json").write_text("{}")
    write_safetensors_parts(tmp_path / "model.safetensors", header, body)
    return tmp_path


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("type_name", FOLDER_TYPES)
def test_every_type_round_trips_single_and_sharded(type_name: str, num_shards: int, tmp_path: Path) -> None:
    expected = write_folder(tmp_path, TinyConfig(), type_name=type_name, num_shards=num_shards)
    with open_folder(tmp_path) as folder:
        assert set(folder.tensors) == {hf_name(name) for name in expected}
        for name, values in expected.items():
            found = folder.read(hf_name(name))
            assert (found.dtype, found.shape, found.flags.c_contiguous) == (np.float32, values.shape, True)
            assert found.tobytes() == values.tobytes()


def test_files_of_the_reference_library_are_read_alike(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {"a": rng.random((3, 5), dtype=np.float32), "b": rng.random(7).astype(np.float16)}
    (tmp_path / "config.json").write_text("{}")
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    folder = open_folder(tmp_path)
    for name, values in tensors.items():
        np.testing.assert_array_equal(folder.read(name), values.astype(np.float32))


def test_our_writer_is_read_by_the_reference_library(tmp_path: Path) -> None:
    expected = write_folder(tmp_path, SMALL)
    reference = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    for name, values in expected.items():
        np.testing.assert_array_equal(reference[hf_name(name)], values)


def test_a_single_file_may_be_named(tmp_path: Path) -> None:
    expected = write_folder(tmp_path, SMALL)
    folder = open_folder(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(folder.read(hf_name("embed")), expected["embed"])
    assert folder.metadata["hidden_size"] == 32


def test_values_outlive_close_and_are_read_only(tmp_path: Path) -> None:
    expected = write_folder(tmp_path, SMALL)
    folder = open_folder(tmp_path)
    values = folder.read(hf_name("embed"))
    folder.close()
    np.testing.assert_array_equal(values, expected["embed"])
    assert not values.flags.writeable
    with pytest.raises(ModelFileError, match="closed"):
        folder.read(hf_name("embed"))


@pytest.mark.parametrize(
    ("header", "named"),
    [
        ({"a": GOOD_ENTRY, "b": {**GOOD_ENTRY, "data_offsets": [16, 48]}}, "'a' and 'b' overlap"),
        ({"a": {**GOOD_ENTRY, "data_offsets": [40, 72]}}, "truncated"),
        ({"a": {**GOOD_ENTRY, "data_offsets": [32, 0]}}, "-32 bytes"),
        ({"a": {**GOOD_ENTRY, "data_offsets": [0, 31]}}, "31 bytes"),
        ({"a": {**GOOD_ENTRY, "data_offsets": [0]}}, "data_offsets"),
        ({"a": {**GOOD_ENTRY, "data_offsets": [-32, 0]}}, "data_offsets"),
        ({"a": {**GOOD_ENTRY, "data_offsets": [0.0, 32.0]}}, "data_offsets"),
        ({"a": {**GOOD_ENTRY, "shape": [1 << 40, 1 << 40]}}, "needs"),
        ({"a": {**GOOD_ENTRY, "shape": [0, 4]}}, "shape"),
        ({"a": {**GOOD_ENTRY, "shape": "24"}}, "shape"),
        ({"a": {**GOOD_ENTRY, "shape": [True, 8]}}, "shape"),
        ({"a": {**GOOD_ENTRY, "shape": [1] * 9}}, "shape"),
        ({"a": {"shape": [8]}}, "no dtype"),
        ({"a": 5}, "no dtype"),
        ([], "must be an object"),
        (b'{"a": ' + b"[" * 100000, "nested"),
        (b'{"a": {}, "a": {}}', "twice"),
        (b'{"a": ' + b"9" * 5000 + b"}", "too many digits"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b'{"a', "is not JSON"),
    ],
)
def test_malformed_headers_are_refused_with_the_reason(header: Any, named: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=named):
        open_folder(folder_with_header(tmp_path, header))


def test_the_good_entry_of_those_headers_is_accepted(tmp_path: Path) -> None:
    header = {"a": GOOD_ENTRY, "b": {**GOOD_ENTRY, "data_offsets": [32, 64]}}
    assert open_folder(folder_with_header(tmp_path, header)).read("b").shape == (2, 4)


@pytest.mark.parametrize("dtype", ["F64", "I64", "F8_E4M3", "BOOL"])
def test_other_types_are_named(dtype: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=f"stored as {dtype}; supported: F32, F16, BF16"):
        open_folder(folder_with_header(tmp_path, {"a": {**GOOD_ENTRY, "dtype": dtype}}))


@pytest.mark.parametrize("length", [65, 1 << 20, 1 << 40, (1 << 64) - 1])
def test_header_length_beyond_the_file_is_refused(length: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(length.to_bytes(8, "little") + b"{}" + bytes(62))
    with pytest.raises(ModelFileError, match="claims"):
        open_folder(tmp_path)


@pytest.mark.parametrize("escape", ["../x.safetensors", "sub/x.safetensors", "..\\x.safetensors", "/x.safetensors"])
def test_the_index_cannot_leave_its_folder(escape: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_folder(folder, SMALL, num_shards=2)
    # The file it points at exists, so only the check on the name can refuse it.
    outside = folder / escape.replace("\\", "/")
    if not escape.startswith("/"):
        outside.parent.mkdir(exist_ok=True)
        os.link(folder / "model-00001-of-00002.safetensors", outside)
    index = json.loads((folder / INDEX).read_text())
    open_folder(folder)
    first = next(iter(index["weight_map"]))
    index["weight_map"][first] = escape
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelFileError, match="files of this folder"):
        open_folder(folder)


@pytest.mark.parametrize("bad", [5, None, "x.bin", "C:x.safetensors", ".safetensors", "a\0.safetensors"])
def test_index_entries_are_plain_file_names(bad: Any, tmp_path: Path) -> None:
    write_folder(tmp_path, SMALL, num_shards=2)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": bad}}))
    with pytest.raises(ModelFileError, match="files of this folder"):
        open_folder(tmp_path)


def test_index_and_shards_must_agree(tmp_path: Path) -> None:
    write_folder(tmp_path, SMALL, num_shards=2)
    index = json.loads((tmp_path / INDEX).read_text())
    moved = dict(index["weight_map"])
    name = next(iter(moved))
    moved[name] = next(other for other in moved.values() if other != moved[name])
    without = {key: value for key, value in index["weight_map"].items() if key != name}
    for weight_map in (moved, without, {**index["weight_map"], "extra": moved[name]}):
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ModelFileError, match="is listed in"):
            open_folder(tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"config\.json"):
        open_folder(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelFileError, match=r"neither model\.safetensors nor"):
        open_folder(tmp_path)
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(ModelFileError, match=r"gone\.safetensors"):
        open_folder(tmp_path)


def test_truncation_anywhere_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, SMALL)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    header_end = 8 + int.from_bytes(whole[:8], "little")
    for size in [*range(header_end + 1), (header_end + len(whole)) // 2, len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(ModelFileError):
            open_folder(tmp_path)
    path.write_bytes(whole)
    open_folder(tmp_path)


@settings(max_examples=scaled(200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.integers(0, 600), st.integers(0, 255), max_size=8))
def test_flipped_header_bytes_parse_or_fail_cleanly(changes: dict[int, int], tmp_path: Path) -> None:
    write_folder(tmp_path, SMALL)
    path = tmp_path / "model.safetensors"
    damaged = bytearray(path.read_bytes())
    for position, value in changes.items():
        damaged[position] = value
    path.write_bytes(damaged)
    start = time.thread_time()
    with suppress(ModelFileError):
        folder = open_folder(tmp_path)
        for name in folder.tensors:
            folder.read(name)
    assert time.thread_time() - start < 1
