"""What the BLAS does to a row beside others."""

from __future__ import annotations

import numpy as np
import pytest

from verispec.backends.blas import blas_name, rows_beside_others

EXACT = 1  # one product has no order of summation


def test_one_product_per_value_depends_on_no_neighbour() -> None:
    assert [row.num_different for row in rows_beside_others(EXACT, 64, [1, 3, 8])] == [0, 0, 0]


@pytest.mark.skipif("openblas" not in blas_name(), reason="other libraries may sum in one order")
def test_long_sums_depend_on_the_number_of_rows() -> None:
    rows = rows_beside_others(1536, 576, [1, 3, 7, 8])
    assert [row.num_others for row in rows] == [1, 3, 7, 8]
    assert all(row.num_values == 576 for row in rows)
    assert any(row.num_different > 100 for row in rows)
    assert all(0 <= row.largest_difference < 1e-2 for row in rows)
    assert all((row.largest_difference > 0) == (row.num_different > 0) for row in rows)


def test_bits_are_compared_with_the_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a product whose last row depends on the number of rows is found out, to the value."""

    class Rows(np.ndarray):
        def __matmul__(self, weights: np.ndarray) -> np.ndarray:
            return np.full((len(self), weights.shape[1]), len(self), dtype=np.float32)

    class Generator:
        def standard_normal(self, shape: tuple[int, int], dtype: type) -> np.ndarray:
            return np.zeros(shape, dtype).view(Rows)

    monkeypatch.setattr(np.random, "default_rng", lambda seed: Generator())
    (row,) = rows_beside_others(4, 6, [3])
    assert row == (3, 6, 6, 3.0)
