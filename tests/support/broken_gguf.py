"""Small GGUF models written byte by byte, with the place of every integer noted, and thousands of ways to break them.

The writer is independent of the reader under test and can also write what no honest writer would: keys twice, counts
that lie, arrays nested without end.
"""

import itertools
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tests.support.broken_files import Case
from tests.support.tiny_models import TinyConfig, gguf_metadata, gguf_name, make_tensors

FILE = "model.gguf"
NAN, INF = float("nan"), float("inf")
TINY = {"num_layers": 1, "hidden_size": 8, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "mlp_size": 8}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
BYTE_LEVEL = {
    "model": "gpt2", "pre": "smollm", "tokens": ["<|end|>", "a", "b", "ab", "Ġ", "Ġa"], "merges": ["a b", "Ġ a"],
    "token_type": [3, 1, 1, 1, 1, 1], "bos_token_id": 0, "eos_token_id": 0, "add_bos_token": False,
}  # fmt: skip
SENTENCEPIECE = {
    "model": "llama", "tokens": ["<unk>", "</s>", "<0x0A>", "a", "b", "ab"], "token_type": [2, 3, 6, 1, 1, 1],
    "scores": [0.0, 0.0, 0.0, -1.0, -2.0, -3.0], "bos_token_id": 1, "eos_token_id": 1, "add_space_prefix": True,
}  # fmt: skip
# What an integer can be replaced by, where it fits; also the file's own length and the neighbours of the true value.
INTEGERS = (0, 1, 2, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1, 2**32, 2**62, 2**63, 2**64 - 2, 2**64 - 1)
WRONG_VALUES: tuple[Any, ...] = (
    None, 0, -1, 7, 2**31, -(2**63), 2**64 - 1, 0.5, NAN, INF, True, "", "x\n\x1b[2J", "y" * 3000, [], [0], [-1], [NAN],
    ["x"], ["a", "a"], [[0]], [["x"]], [[[[[0]]]]], [True], [2**63],
)  # fmt: skip


class Field(NamedTuple):
    offset: int
    nbytes: int


class Tensor(NamedTuple):
    name: str
    dims: Sequence[int]  # innermost first, as in the file
    type_id: int
    offset: int


class Writer:
    """A GGUF file in the making; `fields` has every integer written so far."""

    def __init__(self) -> None:
        self.data, self.fields = bytearray(), list[Field]()

    def integer(self, code: str, value: int) -> None:
        self.fields.append(Field(len(self.data), struct.calcsize(code)))
        self.data += struct.pack(code, value)

    def string(self, text: str) -> None:
        raw = text.encode()
        self.integer("<Q", len(raw))
        self.data += raw

    def value(self, value: Any, *, with_type: bool = True) -> None:
        type_id = _type_of(value)
        if with_type:
            self.integer("<I", type_id)
        match value:
            case bool():
                self.data.append(value)
            case int():
                self.integer({4: "<I", 10: "<Q", 11: "<q"}[type_id], value)
            case float():
                self.data += struct.pack("<f", value)
            case str():
                self.string(value)
            case list():
                self.integer("<I", _type_of(value[0]) if value else 4)
                self.integer("<Q", len(value))
                for item in value:
                    self.value(item, with_type=False)


def _type_of(value: Any) -> int:
    match value:
        case bool():
            return 7
        case int():
            return 4 if 0 <= value < 2**32 else 10 if value > 0 else 11
        case float():
            return 6
        case str():
            return 8
    return 9


class Model(NamedTuple):
    """A whole file: its header's length, and where its integers are."""

    data: bytes
    header_nbytes: int
    fields: list[Field]


def metadata(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    config = TinyConfig(**TINY, vocab_size=len(tokenizer["tokens"]), tied_head=True)
    named = {f"tokenizer.ggml.{name}": value for name, value in tokenizer.items()}
    return {
        "general.architecture": "llama", "general.alignment": 32, **gguf_metadata(config), **named,
        "tokenizer.chat_template": TEMPLATE,
    }  # fmt: skip


def weights(num_tokens: int) -> dict[str, npt.NDArray[Any]]:
    config = TinyConfig(**TINY, vocab_size=num_tokens, tied_head=True)
    return {gguf_name(name): values for name, values in make_tensors(config).items()}


def layout(arrays: Mapping[str, npt.NDArray[Any]], type_ids: Mapping[str, int] | None = None) -> list[Tensor]:
    tensors, offset = [], 0
    for name, values in arrays.items():
        tensors.append(Tensor(name, values.shape[::-1], (type_ids or {}).get(name, 0), offset))
        offset += -(-values.nbytes // 32) * 32
    return tensors


def build(
    pairs: Sequence[tuple[str, Any]], arrays: Mapping[str, npt.NDArray[Any]], tensors: Sequence[Tensor] | None = None
) -> Model:
    """The file of these metadata pairs and arrays; `tensors` is its tensor table, if that is to lie."""
    table = layout(arrays) if tensors is None else tensors
    out = Writer()
    out.data += b"GGUF"
    out.integer("<I", 3)
    out.integer("<Q", len(table))
    out.integer("<Q", len(pairs))
    for key, value in pairs:
        out.string(key)
        out.value(value)
    for tensor in table:
        out.string(tensor.name)
        out.integer("<I", len(tensor.dims))
        for size in tensor.dims:
            out.integer("<Q", size)
        out.integer("<I", tensor.type_id)
        out.integer("<Q", tensor.offset)
    header_nbytes = len(out.data)
    body = b"".join(values.tobytes().ljust(-(-values.nbytes // 32) * 32, b"\0") for values in arrays.values())
    return Model(bytes(out.data) + b"\0" * (-header_nbytes % 32) + body, header_nbytes, out.fields)


def model(tokenizer: Mapping[str, Any], **changes: Any) -> Model:
    """A sound file, with changed metadata: None drops a key; `__` in a name stands for a dot."""
    changed = metadata(tokenizer) | {key.replace("__", "."): value for key, value in changes.items()}
    pairs = [(key, value) for key, value in changed.items() if value is not None]
    return build(pairs, weights(len(tokenizer["tokens"])))


def cases() -> Iterator[Case]:
    for kind, tokenizer in (("byte-level", BYTE_LEVEL), ("sentencepiece", SENTENCEPIECE)):
        sound = model(tokenizer)
        yield Case(f"{kind}, sound", FILE, {FILE: sound.data}, must_work=True)
        broken = itertools.chain(
            _truncated(sound), _wrong_integers(sound), _flipped_bytes(sound), _wrong_metadata(tokenizer)
        )
        for name, data in itertools.chain(broken, _wrong_tensors(tokenizer)):
            yield Case(f"{kind}, {name}", FILE, {FILE: data})
    for name, data in _bombs():
        yield Case(name, FILE, {FILE: data})


def _truncated(sound: Model) -> Iterator[tuple[str, bytes]]:
    points = np.linspace(sound.header_nbytes, len(sound.data) - 1, 64, dtype=int).tolist()
    for nbytes in [*range(sound.header_nbytes), *points]:
        yield f"truncated to {nbytes}", sound.data[:nbytes]


def _wrong_integers(sound: Model) -> Iterator[tuple[str, bytes]]:
    for offset, nbytes in sound.fields:
        true = int.from_bytes(sound.data[offset : offset + nbytes], "little")
        for value in sorted({*INTEGERS, len(sound.data), len(sound.data) - offset, true - 1, true + 1} - {true}):
            if 0 <= value < 1 << 8 * nbytes:
                changed = value.to_bytes(nbytes, "little")
                yield f"{value} at {offset}", sound.data[:offset] + changed + sound.data[offset + nbytes :]


def _flipped_bytes(sound: Model) -> Iterator[tuple[str, bytes]]:
    rng = np.random.default_rng(1)
    for i in range(300):
        data = bytearray(sound.data)
        for position in rng.integers(0, sound.header_nbytes, 1 + i % 4):
            data[position] ^= int(rng.integers(1, 256))
        yield f"flipped bytes {i}", bytes(data)


def _wrong_metadata(tokenizer: Mapping[str, Any]) -> Iterator[tuple[str, bytes]]:
    sound = metadata(tokenizer)
    arrays = weights(len(tokenizer["tokens"]))
    for key in sound:
        for i, value in enumerate(WRONG_VALUES):
            yield f"{key} wrong in way {i}", model(tokenizer, **{key: value}).data
        yield f"{key} twice", build([*sound.items(), (key, sound[key])], arrays).data


def _wrong_tensors(tokenizer: Mapping[str, Any]) -> Iterator[tuple[str, bytes]]:
    pairs = list(metadata(tokenizer).items())
    arrays = weights(len(tokenizer["tokens"]))
    table = layout(arrays)

    def changed(index: int, **fields: Any) -> bytes:
        return build(pairs, arrays, [*table[:index], table[index]._replace(**fields), *table[index + 1 :]]).data

    for index, tensor in enumerate(table):
        yield f"{tensor.name} missing", build(pairs, arrays, table[:index] + table[index + 1 :]).data
        yield f"{tensor.name} twice", build(pairs, arrays, [*table, tensor]).data
        yield f"{tensor.name} overlapping", changed(index, offset=table[index - 1].offset)
        yield f"{tensor.name} not aligned", changed(index, offset=tensor.offset + 1)
        yield f"{tensor.name} renamed", changed(index, name="blk.9\n" + "x" * 1000)
        yield f"{tensor.name} reshaped", changed(index, dims=[1, *tensor.dims])
        yield f"{tensor.name} reversed", changed(index, dims=[2, *tensor.dims[:-1]])
        for value in (NAN, INF, -INF):
            spoilt = arrays[tensor.name].copy()
            spoilt.flat[-1] = value
            yield f"{tensor.name} with {value}", build(pairs, {**arrays, tensor.name: spoilt}).data
            halves = spoilt.astype(np.float16)
            spoilt_arrays = {**arrays, tensor.name: halves}
            halves_table = layout(spoilt_arrays, {tensor.name: 1})
            yield f"{tensor.name} with F16 {value}", build(pairs, spoilt_arrays, halves_table).data
    for type_id in range(45):
        yield f"type {type_id}", changed(0, type_id=type_id)
    for alignment in (1, 8, 24, 64, 2**16, 2**17):
        yield f"alignment {alignment}", model(tokenizer, general__alignment=alignment).data


def _bombs() -> Iterator[tuple[str, bytes]]:
    """Files of a few hundred KB to 2 MB that ask for far more: memory and time must follow the size."""
    arrays = weights(len(SENTENCEPIECE["tokens"]))
    long = "a" * 1_000_000
    yield "arrays 10,000 deep", _deep_array(10_000)
    yield "20,000 empty strings", build([("x", [""] * 20_000), *metadata(BYTE_LEVEL).items()], arrays).data
    yield "20,000 short strings", build([("x", ["字"] * 20_000), *metadata(BYTE_LEVEL).items()], arrays).data
    yield "10,000 empty arrays", build([("x", [[]] * 10_000), *metadata(BYTE_LEVEL).items()], arrays).data
    yield "10,000 metadata pairs", build([(f"k{i}", 0) for i in range(10_000)], arrays).data
    yield "5,000 tensors", build([], {}, [Tensor(f"t{i}", [1], 0, 0) for i in range(5_000)]).data
    yield "key of 60,000 characters twice", build([("k\n" * 30_000, 0)] * 2, arrays).data
    for key in ("tokens", "merges", "pre", "model"):
        for value in (long, [long], [long, long]):
            for kind in (BYTE_LEVEL, SENTENCEPIECE):
                yield f"{key} of a million characters", model(kind, **{f"tokenizer.ggml.{key}": value}).data
    tokens = [*SENTENCEPIECE["tokens"][:5], long]
    yield "scored token of a million characters", model(SENTENCEPIECE, **{"tokenizer.ggml.tokens": tokens}).data
    for key in ("general.architecture", "llama.rope.scaling.type", "tokenizer.chat_template"):
        yield f"{key} of a million characters", model(BYTE_LEVEL, **{key: long}).data


def _deep_array(depth: int) -> bytes:
    nested = struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQ", 4, 0)
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"x" + struct.pack("<I", 9) + nested
