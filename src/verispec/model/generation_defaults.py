"""How a model's own files say that it should be sampled: `generation_config.json`, or `general.sampling.*` of a GGUF.

`generate` takes no notice of it and stays greedy; a chat samples by it. Knows both files and the names of
`SamplingParams`' fields, nothing of chat.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from verispec.errors import InputError, ModelFileError
from verispec.model.checkpoint import GGUFTokenizerSource, TokenizerSource
from verispec.model.fields import Fields
from verispec.model.folder_tokenizer import json_fields
from verispec.types import SamplingParams

# For models whose files do not say whether to sample.
CHAT_SAMPLING: Mapping[str, Any] = MappingProxyType({"temperature": 0.7, "top_p": 0.95})

_REAL_FIELDS = ("temperature", "top_p", "min_p", "repetition_penalty")
_GGUF_NAMES = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}
_FLOAT32_DIGITS = 7  # a GGUF has 0.7 as the nearest float32


def generation_defaults(source: TokenizerSource) -> Mapping[str, Any]:
    """Fields of `SamplingParams` with the values that the model's files name; empty where they name none.

    `do_sample` becomes a temperature: false is 0, true without a temperature is 1, as `transformers` has it.
    """
    if isinstance(source, GGUFTokenizerSource):
        fields = Fields(source.metadata, str(source.path))
        keys = {name: f"general.sampling.{_GGUF_NAMES.get(name, name)}" for name in (*_REAL_FIELDS, "top_k")}
        found = _read(fields, keys)
    else:
        fields = json_fields(source.folder / "generation_config.json")
        found = _read(fields, {name: name for name in (*_REAL_FIELDS, "top_k")})
        if "do_sample" in fields:
            found["temperature"] = found.get("temperature", 1.0) if fields.flag("do_sample", default=False) else 0.0
    try:
        SamplingParams.from_mapping(found)
    except InputError as error:
        raise ModelFileError(f"{fields.where}: {error}") from error
    return MappingProxyType(found)


def chat_sampling(defaults: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a chat samples by: the model's own defaults, with `CHAT_SAMPLING` where they do not say whether to sample.

    What a user gives goes on top: `SamplingParams.from_mapping({**chat_sampling(llm.generation_defaults), **given})`.
    """
    return defaults if "temperature" in defaults else MappingProxyType({**CHAT_SAMPLING, **defaults})


def _read(fields: Fields, keys: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: float(f"{fields.real(keys[name]):.{_FLOAT32_DIGITS}g}") for name in _REAL_FIELDS if keys[name] in fields
    }
    if keys["top_k"] in fields:
        found["top_k"] = max(0, fields.integer(keys["top_k"]))  # some write "off" as -1
    return found
