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
        return cls.from_buffer_copy(_encoded(address, (columns, rows), (columns,), (_COLUMNS, box_rows)))

    @classmethod
    def of_blocks(cls, address: int, rows: int, columns: int) -> TensorMap:
        """Of weights [rows, columns] in blocks of 64 rows, of which row 16 t + 2 j + e comes as row 8 j + 2 t + e; in
        boxes of half a block. Zeros behind the last block."""
        sizes, strides = (columns, 2, 4, 8, rows // 64), tuple(columns * step for step in (1, 16, 2, 64))
        return cls.from_buffer_copy(_encoded(address, sizes, strides, (_COLUMNS, 2, 4, 4, 1)))


@lru_cache(maxsize=4096)
def _encoded(address: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]) -> bytes:
    """Sizes and box from the innermost dimension on; strides, in values, of all others."""
    from cuda.bindings import driver

    found = checked(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, len(sizes), address,
            [driver.cuuint64_t(size) for size in sizes], [driver.cuuint64_t(2 * stride) for stride in strides],
            [driver.cuuint32_t(size) for size in box], [driver.cuuint32_t(1)] * len(sizes),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )  # fmt: skip
    return ctypes.string_at(found.getPtr(), 128)
