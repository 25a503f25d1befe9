"""One tiny model for the whole folder, and one server on it that most tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.chat_model import write_chat_model
from tests.support.served import Served, serving
from tests.support.tiny_llm import fix_cost, loaded
from verispec.llm import LLM


@pytest.fixture(scope="session")
def chat_llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder: Path = tmp_path_factory.mktemp("chat-model")
    with loaded(write_chat_model(folder / "tiny.gguf"), folder, drafter="suffix") as llm:
        fix_cost(llm)
        yield llm


@pytest.fixture(scope="session")
def served(chat_llm: LLM) -> Iterator[Served]:
    with serving(chat_llm) as server:
        yield server
