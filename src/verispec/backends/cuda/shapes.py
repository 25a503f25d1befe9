"""Sizes of a model as the kernels see them, the rule for parts of K, and the order of weight rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from verispec.errors import InputError
from verispec.model.architecture import Architecture, LayerSpec
from verispec.model.elementary import sin_cos

TILE = 64  # positions of one softmax step, and columns of one stage of the weights
SPAN = 256  # positions whose sums are one chain of tiles; spans are merged in ascending order
_MAX_PARTS = 4
_ENOUGH_WORK = 8192


@dataclass(frozen=True, slots=True)
class Shapes:
    """What kernels are compiled for."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    eps: float
    qk_norm: bool = False

    @property
    def qkv(self) -> int:
        """Outputs of the fused q/k/v product."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def attention(self) -> int:
        """Inputs of the output product."""
        return self.heads * self.head_dim

    @classmethod
    def of(cls, arch: Architecture) -> Shapes:
        """The shapes of an architecture whose layers are all alike and plain."""
        first = arch.layers[0]
        plain = LayerSpec(rope=first.rope, query_scalar=arch.head_dim, qkv_bias=first.qkv_bias, qk_norm=first.qk_norm)
        if any(spec != plain for spec in arch.layers) or arch.embed_scale != 1:
            raise InputError(f"the CUDA kernels do not serve {arch.family}: its layers have windows or norms they lack")
        return cls(
            width=arch.hidden_size,
            heads=arch.num_heads,
            kv_heads=arch.num_kv_heads,
            head_dim=arch.head_dim,
            mlp=arch.mlp_size,
            vocab=arch.vocab_size,
            eps=arch.norm_eps,
            qk_norm=first.qk_norm,
        )

    def refusal(self) -> str | None:
        """Why the kernels cannot serve these shapes, in one sentence; None if they can."""
        if self.width % 16 or self.mlp % 16 or self.head_dim % 16 or self.vocab % 16:
            return "the CUDA kernels need width, MLP size, head size and vocabulary in multiples of 16"
        if self.head_dim > 128:
            return f"the CUDA kernels serve heads up to 128, not {self.head_dim}"
        if self.heads // self.kv_heads > 16:
            return f"the CUDA kernels serve up to 16 heads per K/V head, not {self.heads // self.kv_heads}"
        if self.qk_norm and self.head_dim & (self.head_dim - 1):
            return f"the CUDA kernels need a power of two as head size for the q/k norm, not {self.head_dim}"
        return None


def num_parts(outputs: int, columns: int) -> int:
    """Into how many equal parts of K a product is cut: part of the arithmetic, so a function of its sizes alone."""
    possible = [s for s in range(1, _MAX_PARTS + 1) if columns % (TILE * s) == 0]
    enough = [s for s in possible if s * outputs >= min(2 * columns, _ENOUGH_WORK)]
    return min(enough, default=max(possible, default=1))


def pair_order(first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.int64]:
    """Tiles of 16 weight rows: eight first elements of pairs, then their partners. Lengths are multiples of 8."""
    return np.concatenate([first.reshape(-1, 1, 8), second.reshape(-1, 1, 8)], axis=1).reshape(-1)


def qkv_order(shapes: Shapes) -> NDArray[np.int64]:
    """Rows of the stacked q, k and v weights in the order the kernels want: rotary pairs in one tile."""
    starts = np.arange(shapes.heads + 2 * shapes.kv_heads)[:, None] * shapes.head_dim
    half = np.arange(shapes.head_dim // 2)[None, :]
    return pair_order((starts + half).reshape(-1), (starts + half + shapes.head_dim // 2).reshape(-1))


def gate_up_order(shapes: Shapes) -> NDArray[np.int64]:
    """Rows of the stacked gate and up weights in the order the kernels want: gate and up in one tile."""
    gate = np.arange(shapes.mlp)
    return pair_order(gate, gate + shapes.mlp)


def rope_tables(frequencies: NDArray[np.float32], context_len: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosines and sines [context, head_dim / 2] of float64 angles, each rounded once."""
    angles = np.arange(context_len, dtype=np.float64)[:, None] * frequencies.astype(np.float64)
    sin, cos = sin_cos(angles)
    return cos.astype(np.float32), sin.astype(np.float32)
