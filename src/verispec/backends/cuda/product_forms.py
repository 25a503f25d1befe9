"""How products of few rows are cut into blocks.

Every form of a product has the same bits (those of few-bit weights promise none), so all that counts here is time: the
figures were found by timing whole passes on an H200.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple, TypeAlias

import torch

from verispec.backends.cuda.quantize import Quantized
from verispec.backends.cuda.shapes import TILE, num_parts

# Weights that stay in the L2 cache are read by several blocks of 16 rows: a warp's own work is what takes time there.
# Others have wide.cu from 9 rows on.
ROWS_PER_TILE, _MAX_ROW_TILES, CACHED_NBYTES = 8, 2, 4 << 20
_STAGE_NBYTES = 2048  # 16 weight rows of 64 columns
_STAGE_ROW_NBYTES = 128
# Shared memory for rings: as much of an SM's 227 KiB as leaves room for the next kernel's first blocks.
_SM_RING_NBYTES, _BLOCK_RING_NBYTES = 160 * 1024, 96 * 1024
_MIN_STAGES, _MAX_STAGES = 4, 16
_WHOLE_STAGES = 8  # of products that are not cut into parts of K, eight rows at most
# Of a quantised product, whose blocks are persistent: bytes of shared memory of a block, at least and at most. They
# start beside the kernel in front, so what they take decides which of them can come to share an SM: never more than
# were meant to, because an SM with twice the work is what all others wait for.
_QKV_NBYTES, _PAIR_NBYTES, ALONE_NBYTES, _DOWN_NBYTES = 72 * 1024, 77 * 1024, 115 * 1024, 148 * 1024
_PAIR_TILES = 4  # to an SM: so many are shared by two blocks of half the warps
_MAX_DRAFT_WARPS, _MAX_DRAFT_STAGES, _MAX_ROWS_NBYTES = 20, 12, 150 * 1024
# The same of a single row, which bench/draft_forms.py found on models of 1B and 1.5B parameters: the most warps, and of
# the gate-up product; chunks of a warp of the down product, and how many may idle. Bytes stand behind the kinds.
_ROW_WARPS, _ROW_GATE_UP_WARPS, _ROW_DOWN_CHUNKS, _ROW_IDLE = 8, 12, 12, 0.05
MAX_BLOCK_NBYTES = 227 * 1024  # of shared memory
# Of products of 9 to 64 rows: most of an SM's shared memory, so that much is on its way; two columns of 64 at once
# where that leaves enough stages. Blocks of more outputs have more to finish when there is nothing left to fetch.
_MAX_WIDE_TILES, _MAX_WIDE_STAGES, _DOUBLE_STAGES, _WIDE_NBYTES = 9, 10, 5, 200 * 1024
# Of products of many rows in parts: blocks of 64 outputs in a tile, by which the sums of up to four parts are held. SMs
# that idle behind the last tiles are where the library is quicker.
LARGE_THREADS, LARGE_ROW_TILE, LARGE_GROUP, _LARGE_BLOCKS, _LARGE_STAGES = 384, 128, 4, 2, 6
_MIN_LARGE_ROWS, _LEAST_BUSY = 512, 0.85
WIDE_THREADS = 160  # four warps that multiply, and one that has the copy engine
Matrix: TypeAlias = torch.Tensor | Quantized


class Kind(IntEnum):
    """What follows a product, as linear.cu numbers it."""

    QKV = 0
    RESIDUAL = 1
    GATE_UP = 2
    HEAD = 3
    PLAIN = 4


_ROW_NBYTES = {Kind.QKV: 64 * 1024, Kind.GATE_UP: 48 * 1024, Kind.RESIDUAL: 100 * 1024}


class DraftForm(NamedTuple):
    """How blocks of a quantised product share its work: quantized.cu says what these are."""

    warps: int
    step: int
    stages: int
    shared: int  # bytes, beside the sums
    per_sm: int  # blocks
    late: int  # 1: the next kernel may start only when this one's rows are there
    enders: int = 1  # warps that add the sums of the others, tile by tile in turns, and do what follows
    among: int = 2  # blocks, those of the kernels beside it too, that an SM's registers have room for


def draft_nbytes(w: tuple[int, int], bits: int, rows: int, warps: int) -> tuple[int, int]:
    """Of a block with so many warps: a chunk for each of them, and the rows."""
    each = -(-(w[1] // TILE) // warps)
    return warps * (128 * bits + 64), warps * each * rows * (TILE + 4)  # values and scales


def sums_nbytes(rows: int, warps: int, enders: int) -> int:
    """What a block has for the sums of its warps, beside a few words."""
    return max(2, enders) * warps * 64 * max(1, rows // 2) * min(2, rows) + 1024


def draft_rows(columns: int, rows: int) -> int:
    """How many rows a block has at once: a power of two, as many as its shared memory has room for."""
    return next(n for n in (1, 2, 4, 8) if n >= min(rows, ROWS_PER_TILE) or 2 * n * columns > _MAX_ROWS_NBYTES)


def draft_form(kind: Kind, w: tuple[int, int], bits: int, rows: int, num_sms: int) -> DraftForm:
    """The form for a matrix [outputs, columns], found by timing whole passes of drafts on an H200."""
    if rows == 1:
        return _row_form(kind, w, bits, num_sms)
    tiles, chunks = w[0] // 16, w[1] // TILE
    is_pair = tiles >= _PAIR_TILES * num_sms
    most = 12 if is_pair or kind is Kind.QKV else _MAX_DRAFT_WARPS
    doubles = [n for n in range(most // 3, most + 1) if chunks % (2 * n) == 0]  # two chunks a step are quicker
    warps = max(doubles, default=max(n for n in range(1, min(chunks, most) + 1) if chunks % n == 0))
    if warps < most // 3 < chunks:  # better a few that idle than few
        warps = most
    each = -(-chunks // warps)
    chunk, row_nbytes = draft_nbytes(w, bits, rows, warps)
    fixed = warps * 1024 + 1024  # by which these rings were found: sums take no more
    is_down = kind is Kind.RESIDUAL and w[1] > w[0]
    least = _PAIR_NBYTES if is_pair else ALONE_NBYTES
    total = _DOWN_NBYTES if is_down else least
    if kind is Kind.QKV and num_sms < tiles and not is_pair:
        least, total = 0, _QKV_NBYTES
    room = total - fixed - row_nbytes
    if room < 3 * chunk:  # rows take what there is
        is_pair, least, room = False, ALONE_NBYTES, MAX_BLOCK_NBYTES - fixed - row_nbytes
    step = 2 if each % 2 == 0 and room >= 3 * 2 * chunk else 1
    stages = max(2, min(_MAX_DRAFT_STAGES // step, room // (step * chunk)))
    shared = max(stages * step * chunk + row_nbytes, least - sums_nbytes(rows, warps, 1))
    return DraftForm(warps, step, stages, shared, 1 + is_pair, int(is_down))


def _row_form(kind: Kind, w: tuple[int, int], bits: int, num_sms: int) -> DraftForm:
    """That of a single row, whose time is mostly that of one step waiting for the other: few warps to add up."""
    tiles, chunks = w[0] // 16, w[1] // TILE
    is_down, is_pair = kind is Kind.RESIDUAL and w[1] > w[0], tiles >= _PAIR_TILES * num_sms
    if is_down:
        warps, total = _down_warps(chunks), ALONE_NBYTES
    else:
        total = _ROW_NBYTES.get(kind, _PAIR_NBYTES)
        most = min(chunks, _ROW_GATE_UP_WARPS if kind is Kind.GATE_UP else _ROW_WARPS)
        doubles = [n for n in range(-(-most // 2), most + 1) if chunks % (2 * n) == 0]  # two chunks a step are quicker
        equal = [n for n in range(most, most // 2, -1) if chunks % n == 0]
        warps = max(doubles, default=(*equal, min(chunks, _ROW_GATE_UP_WARPS))[0])
    each = -(-chunks // warps)
    chunk, row_nbytes = draft_nbytes(w, bits, 1, warps)
    enders = 1 if is_down else 3 if is_pair else 2
    fixed = sums_nbytes(1, warps, enders)
    step = 2 if each % 2 == 0 else 1
    room = max(total - fixed - row_nbytes, 2 * step * chunk)
    stages = min(_MAX_DRAFT_STAGES // step, room // (step * chunk))
    shared = max(stages * step * chunk + row_nbytes, total - fixed)
    per_sm = 1 if kind is Kind.RESIDUAL else 2
    return DraftForm(warps, step, stages, shared, per_sm, int(is_down), enders)


def _down_warps(chunks: int) -> int:
    """So many that each has about as many chunks as is best, an even number, and few idle at the end."""
    counts = range(_ROW_WARPS, _MAX_DRAFT_WARPS + 1)
    even = [(-(-chunks // (2 * n)) * 2, n) for n in counts]
    best = [(abs(each - _ROW_DOWN_CHUNKS), n) for each, n in even if each * n <= chunks * (1 + _ROW_IDLE)]
    return min(best or [(-(-chunks // n) * n, n) for n in counts])[1]


class WideForm(NamedTuple):
    """How blocks of a product of 9 to 64 rows share its work: wide.cu says what these are."""

    tiles: int
    step: int
    stages: int
    shared: int  # bytes


def wide_form(w: tuple[int, int], parts: int, rows: int, num_sms: int) -> WideForm:
    """The form for a matrix [outputs, columns]: blocks of so many outputs that an SM reads the least."""
    usable = num_sms if parts <= 2 else num_sms * 7 // 8  # SMs of larger clusters must be near each other

    def nbytes(tiles: int) -> int:  # of an SM, in units of a column
        blocks = -(-w[0] // (16 * tiles)) * parts
        return -(-blocks // usable) * (16 * tiles + wide_rows(rows))

    each = min(range(_MAX_WIDE_TILES, 0, -1), key=nbytes)
    stage = (16 * each + wide_rows(rows)) * _STAGE_ROW_NBYTES
    step = 2 if w[1] // parts % (2 * TILE) == 0 and _WIDE_NBYTES // (2 * stage) >= _DOUBLE_STAGES else 1
    stages = max(3, min(w[1] // parts // (TILE * step) + 1, _MAX_WIDE_STAGES, _WIDE_NBYTES // (step * stage)))
    sums = 16 * each * wide_rows(rows) * 4 if parts > 1 else 0  # which other blocks of the cluster read
    return WideForm(each, step, stages, max(stages * step * stage, sums))


def wide_rows(rows: int) -> int:
    return 32 if rows <= 32 else 64


def is_wide(w: torch.Tensor, rows: int) -> bool:
    """Whether wide.cu serves them: more rows than a step of `mma` has, weights that do not stay in the cache."""
    return rows > ROWS_PER_TILE and w.shape[0] * w.shape[1] * 2 > CACHED_NBYTES and w.shape[1] % TILE == 0


class LargeForm(NamedTuple):
    """How clusters of a product of many rows share its work: large.cu says what these are."""

    blocks: int
    stages: int
    shared: int  # bytes
    clusters: int


def large_form(outputs: int, rows: int, num_sms: int) -> LargeForm:
    """The form for a matrix of so many outputs."""
    stage = (LARGE_ROW_TILE + 64 * _LARGE_BLOCKS) * _STAGE_ROW_NBYTES
    clusters = min(num_sms // 2, _num_large_tiles(outputs, rows))
    return LargeForm(_LARGE_BLOCKS, _LARGE_STAGES, _LARGE_STAGES * stage, clusters)


def _num_large_tiles(outputs: int, rows: int) -> int:
    return -(-outputs // (64 * _LARGE_BLOCKS)) * -(-rows // (2 * LARGE_ROW_TILE))


def is_large(w: Matrix, rows: int, num_sms: int) -> bool:
    """Whether large.cu serves so many rows: where the library would leave sums of parts in memory, and all SMs have
    tiles nearly to the end."""
    parts, (outputs, columns) = num_parts(*w.shape), w.shape
    if isinstance(w, Quantized) or rows < _MIN_LARGE_ROWS or parts == 1:
        return False
    if outputs % 64 or columns % (TILE * parts):
        return False
    in_turn = -(-_num_large_tiles(outputs, rows) // (num_sms // 2)) * (num_sms // 2)  # tiles that there is time for
    return outputs * rows >= _LEAST_BUSY * in_turn * 64 * _LARGE_BLOCKS * 2 * LARGE_ROW_TILE


def product_form(w: torch.Tensor, rows: int, *, many: bool, num_sms: int) -> str:
    """What computes a product of so many rows in this form."""
    if many and is_large(w, rows, num_sms):
        return "large.cu"
    return "library" if many else "wide.cu" if is_wide(w, rows) else "linear.cu"


class LinearForm(NamedTuple):
    """How blocks of a product of up to 8 rows, or of cached weights, share its work: linear.cu says what these are."""

    row_tiles: int
    tiles: int
    stages: int
    shared: int  # bytes
    grid: tuple[int, int, int]


def linear_form(w: tuple[int, int], parts: int, rows: int, num_sms: int) -> LinearForm:
    """The form for a matrix [outputs, columns]."""

    def waves(tiles: int, shared: int) -> int:  # how often the SMs take blocks, until all have run
        blocks = -(-weight_tiles // tiles)
        return -(-blocks // (num_sms * (MAX_BLOCK_NBYTES // shared)))

    row_tiles, weight_tiles = min(_MAX_ROW_TILES, -(-rows // ROWS_PER_TILE)), w[0] // 16
    row_blocks = -(-rows // (row_tiles * ROWS_PER_TILE))
    tile_nbytes = (_STAGE_NBYTES + row_tiles * ROWS_PER_TILE * _STAGE_ROW_NBYTES) * parts  # of one stage
    is_whole = parts == row_tiles == 1
    if is_whole and weight_tiles > 256:
        tiles = min((2, 1), key=lambda n: waves(n, n * _WHOLE_STAGES * tile_nbytes))
    else:
        tiles = 1 if parts > 1 or weight_tiles <= 256 else 2
    blocks, stage = -(-weight_tiles // tiles), tile_nbytes * tiles
    room = min(_BLOCK_RING_NBYTES, _SM_RING_NBYTES // -(-blocks * row_blocks // num_sms))
    least = _WHOLE_STAGES if is_whole else _MIN_STAGES
    stages = min(-(-w[1] // parts // TILE) + 1, max(least, min(_MAX_STAGES, room // stage)))
    return LinearForm(row_tiles, tiles, stages, stages * stage, (blocks, row_blocks, 1))
