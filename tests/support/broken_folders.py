"""Hugging Face folders, broken: safetensors headers, shard indexes, and every JSON file beside them."""

import copy
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tests.support.broken_files import Case
from tests.support.broken_gguf import INF, NAN, TEMPLATE, TINY
from tests.support.tiny_models import TinyConfig, hf_config, hf_name, make_tensors

TOKENS = {"<|end|>": 0, "a": 1, "b": 2, "ab": 3, "Ġ": 4, "Ċ": 5}
CONFIG = TinyConfig(**TINY, vocab_size=len(TOKENS))
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER: dict[str, Any] = {
    "version": "1.0", "truncation": None, "padding": None, "normalizer": {"type": "NFC"},
    "post_processor": {
        "type": "TemplateProcessing",
        "special_tokens": {"<|end|>": {"id": "<|end|>", "ids": [0], "tokens": ["<|end|>"]}},
        "single": [{"SpecialToken": {"id": "<|end|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    },
    "added_tokens": [
        {"id": 0, "content": "<|end|>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True},
    ],
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    "model": {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": TOKENS, "merges": [["a", "b"]],
    },
}  # fmt: skip
TOKENIZER_CONFIG: dict[str, Any] = {
    "bos_token": {"content": "<|end|>"}, "eos_token": "<|end|>", "chat_template": TEMPLATE,
}  # fmt: skip
# The other alphabet; read from the parts that differ.
SENTENCEPIECE: dict[str, Any] = {
    "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}]},
    "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    "decoder": {
        "type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    },
    "model": {"type": "Unigram", "unk_id": 0, "vocab": [["<|end|>", 0.0], ["a", -1.0]], "byte_fallback": False},
}  # fmt: skip
GENERATION_CONFIG: dict[str, Any] = {"eos_token_id": [0, 3]}
WRONG_VALUES: tuple[Any, ...] = (
    None, True, 0, 1, -1, 2, 1.5, -0.0, 2**31, 2**32 - 1, 2**32, 2**63, 10**4000, 1e308, NAN, INF, "", "x\n\x1b[2J",
    "y" * 3000, [], [0], [[]], ["x"] * 100, {}, {"x": {"y": [1]}}, [{"x": 1}] * 20,
)  # fmt: skip


def dump(value: Any) -> bytes:
    return json.dumps(value).encode()


SOUND_PARTS = {
    "config": dump(hf_config(CONFIG)), "tokenizer": dump(TOKENIZER), "tokenizer_config": dump(TOKENIZER_CONFIG),
    "generation_config": dump(GENERATION_CONFIG),
}  # fmt: skip


class Folder(NamedTuple):
    """A sound folder in parts, so that each part can be broken alone."""

    header: dict[str, Any]
    body: bytes

    def files(self, **changed: bytes) -> dict[str, bytes]:
        """All files, with some replaced: `config`, `tokenizer`, `tokenizer_config`, `generation_config`, `weights`."""
        weights = changed.pop("weights") if "weights" in changed else container(dump(self.header), self.body)
        named = {f"{name}.json": content for name, content in (SOUND_PARTS | changed).items()}
        return {**named, WEIGHTS: weights}

    def with_header(self, header: Any) -> dict[str, bytes]:
        return self.files(weights=container(dump(header), self.body))


def container(header: bytes, body: bytes, claimed: int | None = None) -> bytes:
    return (len(header) if claimed is None else claimed).to_bytes(8, "little") + header + body


def sound_folder(arrays: Mapping[str, npt.NDArray[Any]] | None = None) -> Folder:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = b""
    for name, values in (make_tensors(CONFIG) if arrays is None else arrays).items():
        offsets = [len(body), len(body) + values.nbytes]
        dtype = {"float32": "F32", "float16": "F16"}[values.dtype.name]
        header[hf_name(name)] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": offsets}
        body += values.tobytes()
    return Folder(header, body)


def cases() -> Iterator[Case]:
    sound = sound_folder()
    yield Case("folder, sound", ".", sound.files(), must_work=True)
    yield Case("one file, sound", WEIGHTS, sound.files(), must_work=True)
    for name, weights in itertools.chain(_broken_containers(sound), _wrong_weights()):
        yield Case(f"safetensors {name}", ".", sound.files(weights=weights))
    for name, header in _wrong_headers(sound.header):
        yield Case(f"header {name}", ".", sound.with_header(header))
    json_files = (("config", hf_config(CONFIG)), ("tokenizer", TOKENIZER), ("tokenizer_config", TOKENIZER_CONFIG),
                  ("generation_config", GENERATION_CONFIG))  # fmt: skip
    for file, value in json_files:
        for name, content in itertools.chain(_broken_json(value, every=3), _json_bombs()):
            yield Case(f"{file}.json {name}", ".", sound.files(**{file: content}))
        # Tokenizers are long and slow to build: half of the wrong values here, the other half below.
        for path, changed in wrong_values(value, every=2 if file == "tokenizer" else 1):
            yield Case(f"{file}.json {path}", ".", sound.files(**{file: dump(changed)}))
    for path, changed in wrong_values(SENTENCEPIECE, start=1, every=2):
        yield Case(f"tokenizer.json {path}", ".", sound.files(tokenizer=dump({**TOKENIZER, **changed})))
    yield from _sharded(sound)


def wrong_values(value: Any, *, start: int = 0, every: int = 1) -> Iterator[tuple[str, Any]]:
    """The value with each of its parts, at any depth, missing or replaced by each wrong value (or every so many)."""
    for path in _paths(value):
        for i, wrong in enumerate(WRONG_VALUES[start::every]):
            changed = copy.deepcopy(value)
            _at(changed, path[:-1])[path[-1]] = wrong
            yield f"{path} wrong in way {i}", changed
        changed = copy.deepcopy(value)
        del _at(changed, path[:-1])[path[-1]]
        yield f"{path} missing", changed


def _paths(value: Any) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (key,)
        yield from ((key, *rest) for rest in _paths(item))


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _broken_json(value: Any, *, every: int = 1) -> Iterator[tuple[str, bytes]]:
    """The text without a byte, for each or every so many, and less often cut there or with a byte that is not text."""
    text = dump(value)
    for i in range(0, len(text), every):
        yield f"without byte {i}", text[:i] + text[i + 1 :]
        if i % 4 == 0:
            yield f"cut at byte {i}", text[:i]
            yield f"with a wrong byte {i}", text[:i] + b"\xff" + text[i + 1 :]


def _json_bombs() -> Iterator[tuple[str, bytes]]:
    yield "deep lists", b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    yield "deep objects", b'{"x":' * 50_000
    yield "deep in a string", b'{"x": "' + b"[" * 100_000 + b'"}'
    yield "many lists", b'{"x": [' + b"[]," * 30_000 + b"[]]}"
    yield "many objects", b'{"x": [' + b"{}," * 30_000 + b"{}]}"
    yield "many keys", b'{"x": {' + b",".join(b'"%d":0' % i for i in range(20_000)) + b"}}"
    yield "a long number", b'{"x": ' + b"9" * 300_000 + b"}"
    yield "a long string", b'{"x": "' + b"a" * 300_000
    yield "escapes", b'{"x": "' + b"\\" * 300_001 + b'"}'
    yield "zeros", b"\0" * 1000
    yield "nothing", b""
    yield "a list", b"[]"
    yield "a byte order mark", b"\xef\xbb\xbf{}"
    yield "UTF-16", '{"x": 1}'.encode("utf-16")


def _broken_containers(sound: Folder) -> Iterator[tuple[str, bytes]]:
    text = dump(sound.header)
    whole = container(text, sound.body)
    points = np.linspace(8 + len(text), len(whole) - 1, 64, dtype=int).tolist()
    for nbytes in [*range(8 + len(text)), *points]:
        yield f"truncated to {nbytes}", whole[:nbytes]
    for claimed in (0, 1, 2, len(text) - 1, len(text) + 1, len(whole), len(whole) - 8, 2**25, 2**25 + 1, 2**31, 2**32,
                    2**62, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1):  # fmt: skip
        yield f"header of {claimed} bytes", container(text, sound.body, claimed)
    for name, broken in itertools.chain(_broken_json(sound.header), _json_bombs()):
        yield f"header {name}", container(broken, sound.body)
    for name, padding in (("spaces", b" "), ("zeros", b"\0"), ("line breaks", b"\n")):
        yield f"header padded with {name}", container(text + padding * 7, sound.body)


def _wrong_headers(header: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    names = [name for name in header if name != "__metadata__"]
    first, second = names[:2]
    # Four tensors stand for all: every field of theirs, wrong in every way.
    for path, changed in wrong_values({name: header[name] for name in ("__metadata__", *names[:4])}):
        yield str(path), {**header, **changed}
    for name in names:
        yield f"{name} missing", {key: value for key, value in header.items() if key != name}
        yield f"{name} renamed", {(key if key != name else "x\n" * 500): value for key, value in header.items()}
        for dtype in ("F64", "I8", "BF16", "F16", "f32", "F8_E4M3"):
            yield f"{name} as {dtype}", {**header, name: header[name] | {"dtype": dtype}}
        for shape in ([], [2**62, 4], [0], [1] * 9, header[name]["shape"][::-1], [-1, -8], [2**31, 2**31]):
            yield f"{name} of shape {shape}", {**header, name: header[name] | {"shape": shape}}
        start, end = header[name]["data_offsets"]
        for offsets in ([start + 4, end + 4], [end, start], [start - 4, end - 4], [0, end - start], [2**62, 2**62 + 1]):
            yield f"{name} at {offsets}", {**header, name: header[name] | {"data_offsets": offsets}}
    yield "overlap", {**header, first: header[first] | {"data_offsets": header[second]["data_offsets"]}}
    yield "unknown tensor", {**header, "model.layers.0.extra": header[first]}
    yield "3,000 tensors", {f"t{i}": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for i in range(3_000)}


def _wrong_weights() -> Iterator[tuple[str, bytes]]:
    arrays = make_tensors(CONFIG)
    casts: tuple[Callable[[Any], Any], ...] = (lambda values: values, lambda values: values.astype(np.float16))
    for name, value, cast in itertools.product(arrays, (NAN, INF, -INF), casts):
        spoilt = cast(arrays[name].copy())
        spoilt.flat[0] = value
        folder = sound_folder({**arrays, name: spoilt})
        yield f"{name} with {value} as {spoilt.dtype}", container(dump(folder.header), folder.body)


def _sharded(sound: Folder) -> Iterator[Case]:
    arrays = make_tensors(CONFIG)
    shards = {f"model-{i + 1}.safetensors": sound_folder(dict(list(arrays.items())[i::2])) for i in range(2)}
    weights = {name: container(dump(shard.header), shard.body) for name, shard in shards.items()}
    placed = {name: file for file, shard in shards.items() for name in shard.header if name != "__metadata__"}
    others = {name: content for name, content in sound.files().items() if name != WEIGHTS}

    def case(name: str, index: bytes, **changed: bytes) -> Case:
        return Case(f"sharded, {name}", ".", {**others, **weights, **changed, INDEX: index})

    sound_index = dump({"metadata": {"total_size": 1}, "weight_map": placed})
    yield Case("sharded, sound", ".", {**others, **weights, INDEX: sound_index}, must_work=True)
    for name, content in itertools.chain(_broken_json(json.loads(sound_index), every=3), _json_bombs()):
        yield case(f"index {name}", content)
    first = next(iter(placed))
    for path, changed in wrong_values({"metadata": {}, "weight_map": {first: placed[first]}}):
        whole = {**placed, **changed["weight_map"]} if isinstance(changed.get("weight_map"), dict) else None
        yield case(f"index {path}", dump(changed if whole is None else {**changed, "weight_map": whole}))
    for file in ("../x", "../x.safetensors", "/etc/passwd", "/tmp/x.safetensors", "..", "a/../x.safetensors", "",
                 "C:x.safetensors", "..\\x.safetensors", ".hidden.safetensors", "none.safetensors", "config.json",
                 "x\0.safetensors", "~/x.safetensors", "model-2.safetensors", "x" * 300 + ".safetensors"):  # fmt: skip
        yield case(f"index names {file[:30]!r}", dump({"weight_map": {**placed, first: file}}))
    yield case("too many shards", dump({"weight_map": {str(i): f"{i}.safetensors" for i in range(600)}}))
    for file, content in weights.items():
        for nbytes in np.linspace(0, len(content) - 1, 32, dtype=int).tolist():
            yield case(f"{file} truncated to {nbytes}", sound_index, **{file: content[:nbytes]})
    (one, two) = weights
    yield case("the same shard twice", sound_index, **{one: weights[two]})
    yield case("shards exchanged", sound_index, **{one: weights[two], two: weights[one]})
