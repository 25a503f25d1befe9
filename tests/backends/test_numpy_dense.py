"""Blocked products: right, the same bits whatever the number of rows, one BLAS thread inside a pass."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from verispec.backends import blas
from verispec.backends.numpy_dense import ROW_BLOCK, Dense

RNG = np.random.default_rng(0)


def weight(num_outputs: int, num_inputs: int = 48) -> np.ndarray:
    return RNG.standard_normal((num_outputs, num_inputs)).astype(np.float32)


@pytest.mark.parametrize("num_outputs", [1, 31, 32, 64, 80, 200])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 7, 8, 9, 16, 20, 64])
def test_the_product_is_right(num_outputs: int, num_rows: int) -> None:
    w, x = weight(num_outputs), weight(num_rows)
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    found = Dense(w)(x)
    assert found.shape == exact.shape
    assert np.allclose(found, exact, atol=1e-4)


def test_fused_weights_stand_side_by_side() -> None:
    parts = [weight(20), weight(50)]
    x = weight(5)
    fused = Dense(*parts)
    assert np.array_equal(fused.outputs(np.array([3, 19, 20, 69])), np.concatenate(parts)[[3, 19, 20, 69]])
    assert np.allclose(fused(x), np.concatenate([x @ p.T for p in parts], axis=1), atol=1e-4)


def test_whole_row_blocks_give_the_same_bits_at_every_size() -> None:
    """Control: the library's own product of the whole matrix does not promise that, and is not what is used."""
    w, row = weight(2048, 300), weight(1, 300)
    dense = Dense(w)
    sizes = [ROW_BLOCK * n for n in (1, 2, 3, 8, 16)]
    results = {dense(np.concatenate([weight(n - 1, 300), row]))[-1].tobytes() for n in sizes}
    assert len(results) == 1


def test_the_number_of_blas_threads_is_put_back() -> None:
    def threads() -> object:
        return blas._call("openblas_get_num_threads", ctypes.c_int)

    before = threads()
    if before is None:
        pytest.skip("numpy's BLAS here is not OpenBLAS")
    blas._call("openblas_set_num_threads", None, 2)
    with blas.single_threaded_blas:
        assert threads() == 1
    assert threads() == 2
    blas._call("openblas_set_num_threads", None, int(str(before)))
