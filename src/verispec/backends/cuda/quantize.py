"""Weights of 4 or 8 bits for drafts, made from bf16 at load: whole numbers (`int4`, `int8`) or floats (`fp8`, which is
e4m3) with a bf16 scale for every 32 columns.

The order is that of quantized.cu: tiles of 16 weight rows, chunks of 64 columns; in them lane 4 g + t has rows g and
g + 8 and, of each 32 columns, 8 t to 8 t + 7. Whole numbers have a sign, and four columns stand in the bytes of a word;
of four bits the upper ones are of row g, the lower ones of row g + 8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch

_GROUP, _CHUNK = 32, 64


@dataclass(frozen=True, slots=True)
class _Whole:
    """Whole numbers with a sign."""

    bits: int
    is_float: ClassVar = False
    # Scales that are tried, times the one that gives the largest all of the range: what is cut off may cost less than
    # coarser steps.
    ranges: ClassVar = (1.0, 0.93, 0.86)

    @property
    def least(self) -> int:
        """The one that has no opposite."""
        return -1 << self.bits - 1

    @property
    def most(self) -> int:
        return -self.least - 1

    def nearest(self, x: torch.Tensor) -> torch.Tensor:
        """The nearest ones, as float32, in the place of what was given."""
        return x.round_().clamp_(self.least, self.most)

    def encoded(self, numbers: torch.Tensor) -> torch.Tensor:
        """Their bits, int64."""
        return numbers.long() & 2**self.bits - 1

    def decoded(self, words: torch.Tensor) -> torch.Tensor:
        """Those in the lowest bits of int64, as float32."""
        return ((words - self.least & 2**self.bits - 1) + self.least).float()


class _E4M3:
    """Floats with three bits behind the first one and without infinity."""

    bits, least, most, is_float = 8, -448, 448, True
    ranges = (1.0, 448 / 288, 448 / 256)  # with another for the largest, others lie nearer to a number

    def nearest(self, x: torch.Tensor) -> torch.Tensor:
        return x.clamp_(self.least, self.most).to(torch.float8_e4m3fn).float()

    def encoded(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.to(torch.float8_e4m3fn).view(torch.uint8).long()

    def decoded(self, words: torch.Tensor) -> torch.Tensor:
        return (words & 255).to(torch.uint8).view(torch.float8_e4m3fn).float()


_Numbers: TypeAlias = _Whole | _E4M3
_KINDS: dict[str, _Numbers] = {"int4": _Whole(4), "int8": _Whole(8), "fp8": _E4M3()}


@dataclass(frozen=True, slots=True)
class Quantized:
    """One matrix [outputs, columns]: a block of numbers, and behind it one of scales."""

    words: torch.Tensor  # int32: [tiles, chunks, loads, lanes, 4], then [tiles, chunks, 8, 4] of bf16
    shape: tuple[int, int]
    kind: str

    @property
    def bits(self) -> int:
        """Of a weight."""
        return _KINDS[self.kind].bits

    @property
    def is_float(self) -> bool:
        """Whether weights, and what rows are rounded to, are floats and no whole numbers."""
        return _KINDS[self.kind].is_float

    def data_ptr(self) -> int:
        """Where it lies."""
        return int(self.words.data_ptr())

    @property
    def values(self) -> torch.Tensor:
        """[tiles, chunks, loads, lanes, 4] int32"""
        outputs, columns = self.shape
        num_words = outputs * columns * self.bits // 32
        return self.words[:num_words].view(outputs // 16, columns // _CHUNK, self.bits // 4, 32, 4)

    @property
    def scales(self) -> torch.Tensor:
        """[tiles, chunks, 8, 4] bf16: of rows g and g + 8, two groups each"""
        outputs, columns = self.shape
        behind = self.words[outputs * columns * self.bits // 32 :]
        return behind.view(torch.bfloat16).view(outputs // 16, columns // _CHUNK, 8, 4)

    def dense(self) -> torch.Tensor:
        """What it stands for, [outputs, columns] float32."""
        tiles, chunks = self.values.shape[:2]
        shifts = _shifts(self.bits, self.values.device)
        if self.bits == 4:
            words = self.values.view(tiles, chunks, 8, 4, 2, 2).long()  # [.., g, t, half of the columns, four of them]
            words = (words[..., None, None] >> shifts).permute(0, 6, 2, 1, 4, 3, 5, 7)
        else:
            words = self.values.view(tiles, chunks, 2, 8, 4, 2, 2).long()  # [.., half, g, t, four, row half]
            words = (words[..., None] >> shifts).permute(0, 6, 3, 1, 2, 4, 5, 7)
        numbers = _KINDS[self.kind].decoded(words.reshape(*self.shape))
        scales = self.scales.float().view(tiles, chunks, 8, 2, 2).permute(0, 3, 2, 1, 4)  # [tiles, half, g, chunks, 2]
        return numbers * scales.reshape(self.shape[0], -1).repeat_interleave(_GROUP, 1)


def quantized(w: torch.Tensor, kind: str) -> Quantized:
    """The matrix in numbers of this kind; its columns are a multiple of 64."""
    outputs, columns = w.shape
    tiles, chunks, bits = outputs // 16, columns // _CHUNK, _KINDS[kind].bits
    numbers, scales = _rounded(w.float().view(outputs, -1, _GROUP), _KINDS[kind])
    # [tiles, row half, g, chunks, half of the columns, t, four of them, each]
    codes = _KINDS[kind].encoded(numbers).view(tiles, 2, 8, chunks, 2, 4, 2, 4)
    if bits == 4:
        ordered = codes.permute(0, 3, 2, 5, 4, 6, 1, 7)  # [tiles, chunks, g, t, half, four, row half, each]
        words = (ordered << _shifts(bits, w.device)).sum((-2, -1)).unsqueeze(2)
    else:
        ordered = codes.permute(0, 3, 4, 2, 5, 6, 1, 7)  # [tiles, chunks, half, g, t, four, row half, each]
        words = (ordered << _shifts(bits, w.device)).sum(-1)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    scales = scales.view(tiles, 2, 8, chunks, 2).permute(0, 3, 2, 1, 4)
    behind = scales.reshape(-1).contiguous().view(torch.int32)
    return Quantized(torch.cat([words.reshape(-1), behind]), (outputs, columns), kind)


def eight_bits(x: torch.Tensor, kind: str) -> torch.Tensor:
    """What the kernel makes of rows [rows, columns] for weights of this kind: numbers of 8 bits, whole ones for whole
    ones, times a scale for every 64 columns."""
    numbers = _KINDS["int8" if kind == "int4" else kind]
    groups = x.float().unflatten(1, (-1, _CHUNK))
    most = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    inverse = torch.full_like(most, numbers.most) / most  # number / tensor is by a reciprocal, which is rounded too
    return (numbers.nearest(groups * inverse) * (most / numbers.most)).flatten(1)


def _shifts(bits: int, device: torch.device) -> torch.Tensor:
    """Where a word has its four columns; of four bits [row half, column]."""
    columns = 8 * torch.arange(4, device=device)
    return columns + torch.tensor([[4], [0]], device=device) if bits == 4 else columns


def _rounded(groups: torch.Tensor, kind: _Numbers) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers [outputs, groups, 32] float32, and scales [outputs, groups] bf16, the best of a few ranges."""
    at = groups.abs().argmax(-1, keepdim=True)
    extreme = groups.gather(-1, at) / kind.least
    best = None
    for size in kind.ranges:
        scale = (extreme * size).to(torch.bfloat16)
        scale = torch.where(scale == 0, torch.ones_like(scale), scale)
        numbers = kind.nearest(groups / scale.float())
        error = (numbers * scale.float()).sub_(groups).square_().sum(-1, keepdim=True)
        if best is None:
            best = error, numbers, scale
        else:
            better = error < best[0]
            best = tuple(torch.where(better, new, old) for new, old in zip((error, numbers, scale), best, strict=True))
    assert best is not None
    return best[1], best[2].squeeze(-1)
