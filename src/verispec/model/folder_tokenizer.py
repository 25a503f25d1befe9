"""Reads the tokenizer of a Hugging Face folder: `tokenizer.json`, and what the config files beside it add.

Nothing in the files is trusted: what does not fit together is a `ModelFileError` that names the file.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from verispec.errors import ModelFileError, UnsupportedModelError
from verispec.model.fields import Fields, json_object, quoted
from verispec.model.tokenizer import Tokenizer, byte_level_bytes, byte_token_bytes, sentencepiece_bytes

# The largest published tokenizer.json files are about 35 MB.
_MAX_JSON_BYTES = 256 * 1024 * 1024

# Ids may have holes, where tokens were removed or a vocabulary was padded, but not more of them than this and tokens.
_MAX_HOLES = 1 << 16

_MAX_NAMED_STEPS = 8


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """Tokenizer of a Hugging Face folder: `tokenizer.json` and, where present, the config files beside it."""
    path = folder / "tokenizer.json"
    description = _read_json(path)
    if description is None:
        raise ModelFileError(f"{path}: missing; only models with a tokenizer.json are supported")
    backend = _load_backend(path, description)
    backend.no_truncation()
    backend.no_padding()

    config = json_fields(folder / "tokenizer_config.json")
    added = backend.get_added_tokens_decoder()
    alphabet = _alphabet(path, description.get("decoder"))
    bos_id = _named_id(backend, config, "bos_token")
    parts: dict[str, Any] = {
        "table": _table(path, backend, added, byte_level=alphabet.byte_level),
        "eos_ids": _eos_ids(folder, backend, config),
        "add_bos": _add_bos(path, backend, config, bos_id),
        "chat_template": _chat_template(folder, config),
    }
    try:
        return Tokenizer(
            backend=backend,
            special_texts={token_id: token.content for token_id, token in added.items() if token.special},
            bos_id=bos_id,
            strips_leading_space=alphabet.strips_leading_space,
            **parts,
        )
    except ModelFileError as error:  # ids that do not fit together, from any of the folder's files
        raise ModelFileError(f"{folder}: {error}") from error


def _load_backend(path: Path, description: Mapping[str, Any]) -> tokenizers.Tokenizer:
    model = description.get("model")
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if isinstance(model, dict) and model.get(key):
            raise UnsupportedModelError(f"{path}: model.{key} {quoted(model[key])}; supported: none")
    with _library_errors(path):
        backend = tokenizers.Tokenizer.from_file(str(path))
    unknown = model.get("unk_token") if isinstance(model, dict) else None
    if isinstance(unknown, str) and backend.token_to_id(unknown) is None:
        raise ModelFileError(f"{path}: model.unk_token {quoted(unknown)} is not in the vocabulary")
    _check_post_processor(path, description.get("post_processor"))
    return backend


def _check_post_processor(path: Path, processor: object) -> None:
    """Refuse a template of undeclared tokens, over which the library panics."""
    steps = processor.get("processors", [processor]) if isinstance(processor, dict) else []
    for step in steps:  # the library has checked all types
        for piece in (
            [*step.get("single", ()), *step.get("pair", ())] if step.get("type") == "TemplateProcessing" else ()
        ):
            name = piece.get("SpecialToken", {}).get("id")
            if name is not None and name not in step["special_tokens"]:
                raise ModelFileError(f"{path}: the post_processor does not declare its token {quoted(name)}")


@contextmanager
def _library_errors(path: Path) -> Iterator[None]:
    """What `tokenizers` raises over a file, its panics included, which are no `Exception`, as `ModelFileError`."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise ModelFileError(f"{path}: not a tokenizer: {quoted(str(error))}") from error


class _Alphabet(NamedTuple):
    byte_level: bool
    strips_leading_space: bool


def _alphabet(path: Path, decoder: object) -> _Alphabet:
    """Which alphabet tokens are written in, read off the `decoder` entry of tokenizer.json."""
    steps = decoder.get("decoders", [decoder]) if isinstance(decoder, dict) else []
    if not isinstance(steps, list):
        raise ModelFileError(f"{path}: decoder.decoders is not a list")
    by_type = {str(step.get("type")): step for step in steps if isinstance(step, dict)}
    if "ByteLevel" in by_type:
        return _Alphabet(byte_level=True, strips_leading_space=False)
    if "Metaspace" in by_type:
        step = by_type["Metaspace"]
        prepends = step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True) is not False
        return _Alphabet(byte_level=False, strips_leading_space=prepends)
    if "ByteFallback" in by_type:
        strip = by_type.get("Strip", {})
        strips = strip.get("content") == " " and bool(strip.get("start"))
        return _Alphabet(byte_level=False, strips_leading_space=strips)
    found = ", ".join(map(quoted, [*by_type][:_MAX_NAMED_STEPS])) or "none"
    raise UnsupportedModelError(f"{path}: decoder {found}; supported: ByteLevel, ByteFallback, Metaspace")


def _table(
    path: Path, backend: tokenizers.Tokenizer, added: Mapping[int, tokenizers.AddedToken], *, byte_level: bool
) -> tuple[bytes, ...]:
    vocab = backend.get_vocab(with_added_tokens=True)
    last_id = max(vocab.values(), default=-1)
    if last_id >= 2 * len(vocab) + _MAX_HOLES:
        raise ModelFileError(f"{path}: token id {last_id} in a vocabulary of {len(vocab)} tokens")
    table = [b""] * (last_id + 1)
    pieces = list(vocab)
    found = byte_level_bytes(pieces) if byte_level else [byte_token_bytes(p) or sentencepiece_bytes(p) for p in pieces]
    for token_id, data in zip(vocab.values(), found, strict=True):
        table[token_id] = data
    for token_id, token in added.items():
        table[token_id] = b"" if token.special else token.content.encode()
    return tuple(table)


def _eos_ids(folder: Path, backend: tokenizers.Tokenizer, config: Fields) -> tuple[int, ...]:
    """Every id that ends a generation, from all three files that may name one, without repeats."""
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        fields = json_fields(folder / name)
        value = fields.mapping.get("eos_token_id")
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(item) is int for item in listed):
            fields.fail("eos_token_id", "an integer or a list of them")
        ids += listed
    eos_id = _named_id(backend, config, "eos_token")
    return tuple(dict.fromkeys(ids if eos_id is None else [*ids, eos_id]))


def _add_bos(path: Path, backend: tokenizers.Tokenizer, config: Fields, bos_id: int | None) -> bool:
    """An explicit `add_bos_token` wins; otherwise what the post-processor does to an empty text."""
    if "add_bos_token" in config:
        return config.flag("add_bos_token", default=False) and bos_id is not None
    with _library_errors(path):
        first_ids = backend.encode("", add_special_tokens=True).ids[:1]
    return bos_id is not None and first_ids == [bos_id]


def _named_id(backend: tokenizers.Tokenizer, config: Fields, name: str) -> int | None:
    """Id of the token that tokenizer_config.json names as a string or as an object with its content."""
    value = config.mapping.get(name)
    content = value.get("content") if isinstance(value, dict) else value
    if content is None:
        return None
    token_id = backend.token_to_id(content) if isinstance(content, str) else None
    if token_id is None:
        raise ModelFileError(f"{config.where}: {name} {quoted(content)} is not in the vocabulary")
    return token_id


def _chat_template(folder: Path, config: Fields) -> str | None:
    """`chat_template.jinja` wins over the config entry, which is a string or a list with one named "default"."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return _read_text(path)
    value = config.mapping.get("chat_template")
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        config.fail("chat_template", "text")
    return value


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ModelFileError(f"{path}: larger than {_MAX_JSON_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFileError(f"{path}: cannot be read as text: {error}") from error


def _read_json(path: Path) -> dict[str, Any] | None:
    """The object in `path`, None where there is no such file."""
    return json_object(_read_text(path).encode(), path, max_nbytes=_MAX_JSON_BYTES) if path.is_file() else None


def json_fields(path: Path) -> Fields:
    """What the object in `path` says; nothing where there is no such file."""
    return Fields(_read_json(path) or {}, str(path))
