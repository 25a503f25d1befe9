"""A tiny model that all tests of batches share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.tiny_llm import loaded, write_model
from verispec.llm import LLM


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("batch") / "tiny.gguf")


@pytest.fixture(scope="session")
def stepwise(tiny_path: Path) -> Iterator[LLM]:
    """Commits one token at a time, so that an answer can be cut anywhere."""
    with loaded(tiny_path, tiny_path.parent / "cache", drafter="none") as llm:
        llm.engine = llm.fresh_engine(max_burst=1)
        yield llm


@pytest.fixture(scope="session")
def tiny(tiny_path: Path) -> Iterator[LLM]:
    with loaded(tiny_path, tiny_path.parent / "cache", drafter="suffix") as llm:
        yield llm
