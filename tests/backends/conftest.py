"""Fixtures of the backends' tests."""

from pathlib import Path

import pytest

from tests.support.native import build_sabotaged


@pytest.fixture(scope="session")
def sabotaged(native_kernels: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Native kernels whose rows are not pure."""
    return build_sabotaged(tmp_path_factory.mktemp("native") / "sabotaged.so")
