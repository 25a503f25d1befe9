"""Weights of 4 or 8 bits for drafts, made from bf16 at load: whole numbers with a bf16 scale for every 32 columns.

The order is that of quantized.cu: tiles of 16 weight rows, chunks of 64 columns; in them lane 4 g + t has rows g and
g + 8 and, of each 32 columns, 8 t to 8 t + 7. Whole numbers have a sign, and four columns stand in the bytes of a word;
of four bits the upper ones are of row g, the lower ones of row g + 8.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_GROUP, _CHUNK = 32, 64
_SHRINKS = (1.0, 0.93, 0.86)  # of the range: what is cut off may cost less than coarser steps


@dataclass(frozen=True, slots=True)
class Quantized:
    """One matrix [outputs, columns]: a block of whole numbers, and behind it one of scales."""

    words: torch.Tensor  # int32: [tiles, chunks, loads, lanes, 4], then [tiles, chunks, 8, 4] of bf16
    shape: tuple[int, int]
    bits: int

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
        half, shifts = 2 ** (self.bits - 1), _shifts(self.bits, self.values.device)
        if self.bits == 4:
            words = self.values.view(tiles, chunks, 8, 4, 2, 2).long()  # [.., g, t, half of the columns, four of them]
            numbers = (words[..., None, None] >> shifts).permute(0, 6, 2, 1, 4, 3, 5, 7)
        else:
            words = self.values.view(tiles, chunks, 2, 8, 4, 2, 2).long()  # [.., half, g, t, four, row half]
            numbers = (words[..., None] >> shifts).permute(0, 6, 3, 1, 2, 4, 5, 7)
        whole = ((numbers.reshape(*self.shape) + half & 2 * half - 1) - half).float()
        scales = self.scales.float().view(tiles, chunks, 8, 2, 2).permute(0, 3, 2, 1, 4)  # [tiles, half, g, chunks, 2]
        return whole * scales.reshape(self.shape[0], -1).repeat_interleave(_GROUP, 1)


def quantized(w: torch.Tensor, bits: int) -> Quantized:
    """The matrix in so many bits a weight; its columns are a multiple of 64."""
    outputs, columns = w.shape
    tiles, chunks = outputs // 16, columns // _CHUNK
    whole, scales = _rounded(w.float().view(outputs, -1, _GROUP), bits)
    # [tiles, row half, g, chunks, half of the columns, t, four of them, each]
    numbers = (whole & 2**bits - 1).view(tiles, 2, 8, chunks, 2, 4, 2, 4)
    if bits == 4:
        ordered = numbers.permute(0, 3, 2, 5, 4, 6, 1, 7)  # [tiles, chunks, g, t, half, four, row half, each]
        words = (ordered << _shifts(bits, w.device)).sum((-2, -1)).unsqueeze(2)
    else:
        ordered = numbers.permute(0, 3, 4, 2, 5, 6, 1, 7)  # [tiles, chunks, half, g, t, four, row half, each]
        words = (ordered << _shifts(bits, w.device)).sum(-1)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    scales = scales.view(tiles, 2, 8, chunks, 2).permute(0, 3, 2, 1, 4)
    behind = scales.reshape(-1).contiguous().view(torch.int32)
    return Quantized(torch.cat([words.reshape(-1), behind]), (outputs, columns), bits)


def eight_bits(x: torch.Tensor) -> torch.Tensor:
    """What the kernel makes of rows [rows, columns]: whole numbers up to 127 times a scale for every 64 columns."""
    groups = x.float().unflatten(1, (-1, _CHUNK))
    most = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    return ((groups * (127 / most)).round() * (most / 127)).flatten(1)


def _shifts(bits: int, device: torch.device) -> torch.Tensor:
    """Where a word has its four columns; of four bits [row half, column]."""
    columns = 8 * torch.arange(4, device=device)
    return columns + torch.tensor([[4], [0]], device=device) if bits == 4 else columns


def _rounded(groups: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers [outputs, groups, 32] int64, and scales [outputs, groups] bf16, the best of a few ranges."""
    half = 2 ** (bits - 1)
    at = groups.abs().argmax(-1, keepdim=True)
    extreme = groups.gather(-1, at) / -half  # the largest becomes the one number that has no opposite
    best = None
    for shrink in _SHRINKS:
        scale = (extreme * shrink).to(torch.bfloat16)
        scale = torch.where(scale == 0, torch.ones_like(scale), scale)
        whole = (groups / scale.float()).round_().clamp_(-half, half - 1)
        error = (whole * scale.float()).sub_(groups).square_().sum(-1, keepdim=True)
        if best is None:
            best = error, whole, scale
        else:
            better = error < best[0]
            best = tuple(torch.where(better, new, old) for new, old in zip((error, whole, scale), best, strict=True))
    assert best is not None
    return best[1].long(), best[2].squeeze(-1)
