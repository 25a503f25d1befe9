"""Where the copy engine finds a matrix: the driver's own encoding, which kernels take by value."""

from __future__ import annotations

import ctypes
from functools import lru_cache

from verispec.backends.cuda.compiler import checked

_COLUMNS = 64  # of a box: 128 bytes, which is as far as its swizzle goes


class TensorMap(ctypes.Structure):
    """128 bytes that only the driver can read."""

    _fields_ = [("words", ctypes.c_uint64 * 16)]

    @classmethod
    def of(cls, address: int, rows: int, columns: int, box_rows: int) -> TensorMap:
        """Of a matrix [rows, columns] of bf16, in boxes of so many rows and 64 columns; zeros behind the last row."""
        return cls.from_buffer_copy(_encoded(address, rows, columns, box_rows))


@lru_cache(maxsize=4096)
def _encoded(address: int, rows: int, columns: int, box_rows: int) -> bytes:
    from cuda.bindings import driver

    found = checked(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, address,
            [driver.cuuint64_t(columns), driver.cuuint64_t(rows)], [driver.cuuint64_t(2 * columns)],
            [driver.cuuint32_t(_COLUMNS), driver.cuuint32_t(box_rows)], [driver.cuuint32_t(1)] * 2,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )  # fmt: skip
    return ctypes.string_at(found.getPtr(), 128)
