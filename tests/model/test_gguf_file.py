"""The GGUF reader: round trips of every type, and that no file can make it fail in any way but its own."""

import struct
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.scale import scaled
from tests.support.tiny_models import (
    GGUF_TYPES,
    K_QUANTS,
    TinyConfig,
    dequantise,
    gguf_name,
    k_quant_config,
    make_tensors,
    quantise,
    write_gguf,
)
from verispec.errors import ModelFileError, UnsupportedModelError
from verispec.model.blocks import FORMATS
from verispec.model.gguf_file import open_gguf
from verispec.model.model_files import ModelFiles

SMALL = TinyConfig(num_layers=1, hidden_size=32, num_heads=2, num_kv_heads=1, mlp_size=32, vocab_size=8)
U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, type_id: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", type_id) + payload


def tensor(name: str, dims: tuple[int, ...] = (8,), type_id: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_id, offset)


def array(type_id: int, count: int, payload: bytes = b"") -> bytes:
    return struct.pack("<IQ", type_id, count) + payload


def file_of(
    pairs: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    *,
    body: bytes = bytes(256),
    version: int = 3,
    num_pairs: int | None = None,
    num_tensors: int | None = None,
) -> bytes:
    pairs, tensors = pairs or [], tensors or []
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(pairs) if num_pairs is None else num_pairs,
    )
    header = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(tensors)
    return header + bytes(-len(header) % 32) + body


@pytest.fixture
def open_bytes(tmp_path: Path) -> Callable[[bytes], ModelFiles]:
    def write_and_open(data: bytes) -> ModelFiles:
        path = tmp_path / "model.gguf"
        path.write_bytes(data)
        return open_gguf(path)

    return write_and_open


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    metadata = {"tokenizer.ggml.tokens": ["a", "bc", "é"] * 3, "tokenizer.ggml.scores": [0.5] * 9, "x.flag": True}
    write_gguf(path, SMALL, metadata=metadata, type_name="Q8_0")
    return path.read_bytes()


def header_nbytes(data: bytes, tmp_path: Path) -> int:
    path = tmp_path / "whole.gguf"
    path.write_bytes(data)
    return min(info.offset for info in open_gguf(path).tensors.values())


@pytest.mark.parametrize("type_name", GGUF_TYPES)
def test_every_type_round_trips_bit_for_bit(type_name: str, tmp_path: Path) -> None:
    config = k_quant_config() if type_name in K_QUANTS else TinyConfig()
    path = tmp_path / "model.gguf"
    tensors = make_tensors(config)
    write_gguf(path, config, tensors, type_name=type_name)
    reference = {t.name: t for t in gguf.GGUFReader(path).tensors}
    with open_gguf(path) as file:
        assert set(file.tensors) == set(reference) == {gguf_name(name) for name in tensors}
        for name, info in file.tensors.items():
            stored = reference[name]
            assert info.type_name == stored.tensor_type.name
            assert (info.offset, info.nbytes) == (stored.data_offset, stored.n_bytes)
            assert list(info.shape) == stored.shape.tolist()[::-1]
            assert file.stored(name).data.tobytes() == stored.data.tobytes()
            values = file.read(name)
            assert (values.dtype, values.shape, values.flags.c_contiguous) == (np.float32, info.shape, True)
            assert values.tobytes() == dequantise(file.stored(name).data, info.type_name).tobytes()


@pytest.mark.parametrize("type_name", [name for name in GGUF_TYPES if name not in K_QUANTS])
def test_quantised_values_are_near_the_original(type_name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    tensors = make_tensors(TinyConfig())
    write_gguf(path, TinyConfig(), tensors, type_name=type_name)
    original = tensors["layers.1.down"]
    found = open_gguf(path).read(gguf_name("layers.1.down"))
    assert np.abs(found - original).max() < 0.1 * np.abs(original).max()


def test_block_table_agrees_with_the_gguf_package() -> None:
    for name, fmt in FORMATS.items():
        reference = gguf.GGMLQuantizationType[name]
        assert fmt.type_id == reference.value
        assert (fmt.block_len, fmt.block_nbytes) == gguf.GGML_QUANT_SIZES[reference]


@given(seed=st.integers(0, 2**32 - 1), type_name=st.sampled_from([n for n in FORMATS if n[0] in "QB"]))
@settings(max_examples=scaled(60))
def test_own_decoders_equal_gguf_on_any_bits(seed: int, type_name: str) -> None:
    from verispec.model.blocks import to_float32

    fmt = FORMATS[type_name]
    data = np.random.default_rng(seed).integers(
        0, 256, (5000 * 32 // max(32, fmt.block_len), fmt.block_nbytes), np.uint8
    )
    with np.errstate(all="ignore"):
        ours, reference = to_float32(data, type_name), dequantise(data, type_name)
    np.testing.assert_array_equal(ours, reference)


def test_no_format_needs_the_gguf_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU may have torch and numpy alone."""
    from verispec.model.blocks import to_float32

    monkeypatch.setitem(sys.modules, "gguf", None)
    for name, fmt in FORMATS.items():
        assert to_float32(np.zeros((2, fmt.block_nbytes), np.uint8), name).shape == (2, fmt.block_len)
    with pytest.raises(ImportError):
        __import__("gguf")  # the control


def test_metadata_values_of_every_kind(open_bytes: Callable[[bytes], ModelFiles]) -> None:
    scalars = [("<B", 0, 200), ("<b", 1, -3), ("<H", 2, 60000), ("<h", 3, -9), ("<I", U32, 2**32 - 1), ("<i", 5, -7)]
    scalars += [("<f", F32, 0.5), ("<Q", U64, 2**64 - 1), ("<q", 11, -(2**63)), ("<d", 12, 0.1)]
    pairs = [pair(f"k{type_id}", type_id, struct.pack(code, value)) for code, type_id, value in scalars]
    pairs += [pair("flag", BOOL, b"\1"), pair("text", STRING, text("Ġhé"))]
    pairs += [pair("ids", ARRAY, array(U32, 3, struct.pack("<3I", 1, 2, 3)))]
    pairs += [pair("words", ARRAY, array(STRING, 3, text("a") + text("") + text("日本")))]
    pairs += [pair("nested", ARRAY, array(ARRAY, 2, array(U32, 1, struct.pack("<I", 5)) + array(STRING, 1, text("x"))))]
    pairs += [pair("none", ARRAY, array(F32, 0))]
    metadata = open_bytes(file_of(pairs)).metadata
    assert [metadata[f"k{type_id}"] for _, type_id, _ in scalars] == [value for _, _, value in scalars]
    assert metadata["flag"] is True
    assert metadata["text"] == "Ġhé"
    assert metadata["ids"].tolist() == [1, 2, 3]
    assert metadata["words"] == ["a", "", "日本"]
    assert [list(inner) for inner in metadata["nested"]] == [[5], ["x"]]
    assert len(metadata["none"]) == 0


def test_version_2_reads_like_version_3(open_bytes: Callable[[bytes], ModelFiles]) -> None:
    assert open_bytes(file_of(tensors=[tensor("t")], version=2)).tensors["t"].shape == (8,)


def test_values_outlive_close(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, SMALL)
    file = open_gguf(path)
    values = file.read("token_embd.weight")
    before = values.copy()
    file.close()
    np.testing.assert_array_equal(values, before)
    assert not values.flags.writeable
    with pytest.raises(ModelFileError, match="closed"):
        file.stored("token_embd.weight")


def test_large_token_lists_are_read_quickly(open_bytes: Callable[[bytes], ModelFiles]) -> None:
    words = b"".join(text(f"Ġtoken{i}") for i in range(49152))
    data = file_of([pair("tokens", ARRAY, array(STRING, 49152, words))])
    start = time.process_time()
    file = open_bytes(data)
    assert time.process_time() - start < 0.15
    assert file.metadata["tokens"][-1] == "Ġtoken49151"


NESTED_TOO_DEEP = array(ARRAY, 1) * 5 + array(U32, 0)


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "not a GGUF file"),
        (b"PK\3\4" + bytes(64), "not a GGUF file"),
        (file_of(version=1), "version 1"),
        (file_of(version=0x03000000), "big-endian"),
        (file_of(num_pairs=2**63), "limit"),
        (file_of(num_tensors=2**32), "limit"),
        (file_of(num_pairs=60000), "bytes are left|needs"),
        (file_of([pair("k", STRING, struct.pack("<Q", 2**62))]), "limit"),
        (file_of([pair("k", STRING, struct.pack("<Q", 5000))]), "left"),
        (file_of([pair("k", STRING, text(b"\xff\xfe"))]), "UTF-8"),
        (file_of([pair("k", ARRAY, array(U64, 2**61))]), "left"),
        (file_of([pair("k", ARRAY, array(STRING, 2**60))]), "left"),
        (file_of([pair("k", ARRAY, array(STRING, 2, text("a") + struct.pack("<Q", 2**63)))]), "claims"),
        (file_of([pair("k", ARRAY, array(STRING, 1, text(b"\xc3")))]), "string 0 of 1"),
        (file_of([pair("k", ARRAY, array(STRING, 2, text("\0a") + text(b"a\xc3")))]), "string 1 of 2"),
        (file_of([pair("k", ARRAY, array(ARRAY, 2**59))]), "left"),
        (file_of([pair("k", ARRAY, NESTED_TOO_DEEP)]), "nests"),
        (file_of([pair("k", ARRAY, array(77, 1))]), "element type 77"),
        (file_of([pair("k", 13, b"")]), "value type 13"),
        (file_of([pair("k", BOOL, b"\1"), pair("k", BOOL, b"\1")]), "'k' appears twice"),
        (file_of([pair("general.alignment", U32, struct.pack("<I", 24))]), "power of two"),
        (file_of([pair("general.alignment", U32, struct.pack("<I", 0))]), "power of two"),
        (file_of([pair("general.alignment", STRING, text("32"))]), "power of two"),
        (file_of(tensors=[tensor("t"), tensor("t", offset=32)]), "'t' appears twice"),
        (file_of(tensors=[tensor("a", (16,)), tensor("b", offset=32)]), "'a' and 'b' overlap"),
        (file_of(tensors=[tensor("t", offset=8)]), "multiple of 32"),
        (file_of(tensors=[tensor("t", offset=2**64 - 32)]), "truncated"),
        (file_of(tensors=[tensor("t", (72,))]), "truncated"),
        (file_of(tensors=[tensor("t", (2**32, 2**32))]), "would take"),
        (file_of(tensors=[tensor("t", (2**63, 2**63, 2**63, 2**63))]), "would take"),
        (file_of(tensors=[tensor("t", (8, 0))]), "would take 0"),
        (file_of(tensors=[tensor("t", ())]), "0 dimensions"),
        (file_of(tensors=[tensor("t", (1, 1, 1, 1, 1))]), "5 dimensions"),
        (file_of(tensors=[tensor("t", (48,), type_id=8)]), "whole Q8_0 blocks of 32"),
    ],
)
def test_malformed_files_are_refused_with_the_reason(
    data: bytes, named: str, open_bytes: Callable[[bytes], ModelFiles]
) -> None:
    with pytest.raises(ModelFileError, match=named):
        open_bytes(data)


def test_the_malformed_files_differ_from_good_ones_only_in_their_fault(
    open_bytes: Callable[[bytes], ModelFiles],
) -> None:
    open_bytes(file_of())
    open_bytes(file_of([pair("k", ARRAY, array(ARRAY, 1) * 3 + array(U32, 0))]))
    open_bytes(file_of([pair("general.alignment", U32, struct.pack("<I", 64))]))
    open_bytes(file_of(tensors=[tensor("a"), tensor("b", offset=32)]))
    open_bytes(file_of(tensors=[tensor("t", (64,))]))
    open_bytes(file_of(tensors=[tensor("t", (64,), type_id=8)]))
    open_bytes(file_of(tensors=[tensor("t", (1, 1, 1, 1))]))


OTHERS = {int(t): t.name for t in gguf.GGMLQuantizationType if t.name not in FORMATS}


@pytest.mark.parametrize(("type_id", "found"), [*OTHERS.items(), (999, "unknown type 999")])
def test_unsupported_types_are_named(
    type_id: int, found: str, open_bytes: Callable[[bytes], ModelFiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the library has them, which need not be there."""
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UnsupportedModelError, match=f"stored as {found}; supported: F32, F16, BF16, Q8_0"):
        open_bytes(file_of(tensors=[tensor("t", (256,), type_id=type_id)]))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.text(st.characters(codec="utf-8") | st.just("\0"))))
def test_lists_of_strings_come_back_one_by_one(texts: list[str], open_bytes: Callable[[bytes], ModelFiles]) -> None:
    payload = array(STRING, len(texts), b"".join(map(text, texts)))
    with open_bytes(file_of([pair("k", ARRAY, payload), pair("end", BOOL, b"\1")])) as file:
        assert (file.metadata["k"], file.metadata["end"]) == (texts, True)


def test_unreadable_paths_are_model_file_errors(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.gguf", tmp_path):
        with pytest.raises(ModelFileError, match=str(path)):
            open_gguf(path)


def test_unknown_tensor_name_is_a_typed_error(small_file: bytes, open_bytes: Callable[[bytes], ModelFiles]) -> None:
    with pytest.raises(ModelFileError, match="no tensor 'nope'"):
        open_bytes(small_file).stored("nope")


def test_truncation_anywhere_is_refused(small_file: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    table_end = header_nbytes(small_file, tmp_path)
    later = [table_end + 1, (table_end + len(small_file)) // 2, len(small_file) - 32]
    for size in [*range(table_end), *later]:
        path.write_bytes(small_file[:size])
        with pytest.raises(ModelFileError):
            open_gguf(path)
    path.write_bytes(small_file)
    assert open_gguf(path).tensors


def peak_nbytes(action: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def memory_bound(file_nbytes: int) -> int:
    # Python's objects for a short string or pair take up to about 16 times their bytes in the file.
    return 16 * file_nbytes + (1 << 18)


def test_the_memory_bound_can_be_broken() -> None:
    assert peak_nbytes(lambda: np.empty(1 << 22, dtype=np.uint8)) > memory_bound(1 << 13)


@settings(max_examples=scaled(400), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_header_bytes_parse_or_fail_cleanly_in_bounded_memory(
    data: st.DataObject, small_file: bytes, tmp_path: Path
) -> None:
    size = header_nbytes(small_file, tmp_path)
    changes = data.draw(
        st.dictionaries(st.integers(0, size - 1), st.one_of(st.sampled_from([0, 1, 127, 255]), st.integers(0, 255)))
    )
    damaged = bytearray(small_file)
    for position, value in changes.items():
        damaged[position] = value
    path = tmp_path / "flipped.gguf"
    path.write_bytes(damaged)

    def open_and_read() -> None:
        try:
            file = open_gguf(path)
        except ModelFileError:
            return
        for name, info in file.tensors.items():
            assert 0 < info.offset <= info.offset + info.nbytes <= len(damaged)
            file.stored(name)

    start = time.thread_time()
    assert peak_nbytes(open_and_read) < memory_bound(len(damaged))
    assert time.thread_time() - start < 1


@settings(max_examples=scaled(200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tail=st.binary(max_size=200), num_tensors=st.integers(0, 3), num_pairs=st.integers(0, 3))
def test_random_headers_parse_or_fail_cleanly(tail: bytes, num_tensors: int, num_pairs: int, tmp_path: Path) -> None:
    path = tmp_path / "random.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_pairs) + tail)
    start = time.thread_time()
    try:
        open_gguf(path)
    except ModelFileError as error:
        assert str(path) in str(error)  # noqa: PT017
    assert time.thread_time() - start < 1


def test_hostile_arrays_stay_within_the_memory_bound(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    words = b"".join(text(chr(0x100 + i % 50) + "y") for i in range(20000))
    empty_arrays = array(U32, 0) * 20000
    for payload in (array(STRING, 20000, words), array(ARRAY, 20000, empty_arrays)):
        path.write_bytes(file_of([pair("k", ARRAY, payload)]))
        assert peak_nbytes(lambda: open_gguf(path)) < memory_bound(path.stat().st_size)


def test_quantise_helper_makes_finite_k_quants() -> None:
    values = np.zeros((4, 512), dtype=np.float32)
    for type_name in K_QUANTS:
        found = dequantise(quantise(values, type_name), type_name)
        assert np.isfinite(found).all()
        assert 0 < np.abs(found).max() < 2
