"""Options and fixtures that more than one folder of tests needs."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import scale
from verispec.backends import native_library
from verispec.llm import LLM
from verispec.model import hub


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shots", help="a folder to keep pictures of the page in")
    parser.addoption("--times", type=int, default=1, help="run this many times as many generated cases")


def pytest_configure(config: pytest.Config) -> None:
    scale.configure(config.getoption("--times"))
    if kernels := os.environ.get("VERISPEC_TEST_KERNELS"):  # another build of them: `make native-asan`
        native_library.PATH = Path(kernels).resolve()


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model in the cache. Tests never download, and a missing model is a failure, not a skip."""
    path = hub.cache_dir() / hub.REGISTRY["smollm2-135m"].file_name
    if not path.is_file():
        pytest.fail(f"{path} is missing: fetch the default model once before running the tests")
    return path


@pytest.fixture(scope="session")
def smollm2_numpy(smollm2_path: Path) -> Iterator[LLM]:
    """The same on the numpy backend, in float32."""
    with LLM(smollm2_path, drafter="none", backend="numpy") as llm:
        yield llm


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Iterator[LLM]:
    """The default model, loaded once for all tests. It drafts nothing unless a call names a drafter."""
    with LLM(smollm2_path, drafter="none") as llm:
        yield llm
