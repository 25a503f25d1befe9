"""What models say of their own sampling, from both kinds of files."""

import json
from pathlib import Path
from typing import Any

import pytest

from verispec.errors import ModelFileError
from verispec.model.checkpoint import FolderTokenizerSource, GGUFTokenizerSource
from verispec.model.generation_defaults import CHAT_SAMPLING, chat_sampling, generation_defaults
from verispec.types import SamplingParams

QWEN = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}


def of_folder(folder: Path, config: Any = None) -> dict[str, Any]:
    if config is not None:
        (folder / "generation_config.json").write_text(json.dumps(config))
    return dict(generation_defaults(FolderTokenizerSource(folder)))


def of_gguf(**sampling: Any) -> dict[str, Any]:
    metadata = {f"general.sampling.{key}": value for key, value in sampling.items()}
    return dict(generation_defaults(GGUFTokenizerSource(Path("m.gguf"), metadata)))


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (None, {}),
        ({"eos_token_id": 2, "max_length": 20, "top_p": None}, {}),
        (QWEN, {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}),
        ({"do_sample": True, "top_k": 64, "min_p": 0.1}, {"temperature": 1.0, "top_k": 64, "min_p": 0.1}),
        ({"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.05},
         {"temperature": 0.0, "repetition_penalty": 1.05}),
        ({"temperature": 1, "top_k": -1}, {"temperature": 1.0, "top_k": 0}),
    ],
)  # fmt: skip
def test_folders(tmp_path: Path, config: Any, found: dict[str, Any]) -> None:
    assert of_folder(tmp_path, config) == found
    SamplingParams.from_mapping(chat_sampling(found))


def test_gguf_float32_values_read_as_they_were_written() -> None:
    stored = {"temp": 0.699999988079071, "top_p": 0.800000011920929, "top_k": 20, "penalty_repeat": 1.10000002384185}
    assert of_gguf(**stored, mirostat=0) == {
        "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1,
    }  # fmt: skip
    assert of_gguf() == {}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"temperature": "hot"}, "temperature must be a finite number"),
        ({"temperature": -1}, "temperature"),
        ({"top_k": 1.5}, "top_k must be an integer"),
        ({"top_p": 0}, "top_p"),
        ({"do_sample": 1}, "do_sample must be true or false"),
        ([], "must be an object"),
    ],
)
def test_a_bad_value_is_named_with_its_file(tmp_path: Path, config: Any, named: str) -> None:
    with pytest.raises(ModelFileError, match=rf"generation_config\.json:? .*{named}"):
        of_folder(tmp_path, config)
    with pytest.raises(ModelFileError, match=r"m\.gguf: general\.sampling\.temp must be a finite number"):
        of_gguf(temp=True)


def test_a_chat_samples_where_the_files_do_not_say() -> None:
    assert chat_sampling({}) == CHAT_SAMPLING
    assert chat_sampling({"repetition_penalty": 1.1}) == {**CHAT_SAMPLING, "repetition_penalty": 1.1}
    assert chat_sampling({"temperature": 0.0}) == {"temperature": 0.0}
