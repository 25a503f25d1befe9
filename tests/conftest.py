"""Fixtures that more than one folder of tests needs."""

from pathlib import Path

import pytest

from verispec.model import hub


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model in the cache. Tests never download, and a missing model is a failure, not a skip."""
    path = hub.cache_dir() / hub.REGISTRY["smollm2-135m"].file_name
    if not path.is_file():
        pytest.fail(f"{path} is missing: fetch the default model once before running the tests")
    return path
