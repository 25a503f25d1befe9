"""Sizes of a model as the kernels see them, the rule for parts of K, and the order of weight rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from verispec.errors import InputError
from verispec.model.architecture import Architecture, Rope, inverse_frequencies
from verispec.model.elementary import sin_cos

TILE = 64  # positions of one softmax step, and columns of one stage of the weights
SPAN = 256  # positions whose sums are one chain of tiles; spans are merged in ascending order
_MAX_PARTS = 4
_ENOUGH_WORK = 8192
NO_WINDOW = 1 << 30


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
    gelu: bool = False  # the activation; SiLU otherwise
    post_norms: bool = False
    query_scalar: float | None = None  # None: head_dim
    embed_scale: float = 1.0

    @property
    def qkv(self) -> int:
        """Outputs of the fused q/k/v product."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def attention(self) -> int:
        """Inputs of the output product."""
        return self.heads * self.head_dim

    @property
    def has_whole_chunks(self) -> bool:
        """Whether its matrices can be of few bits: those come in chunks of columns."""
        return not (self.width % TILE or self.attention % TILE or self.mlp % TILE)

    @classmethod
    def of(cls, arch: Architecture) -> Shapes:
        """The shapes of an architecture whose layers are alike, but for windows and RoPE."""
        first = arch.layers[0]
        if any(replace(spec, rope=first.rope, window=first.window) != first for spec in arch.layers):
            raise InputError(f"the CUDA kernels do not serve {arch.family}: its layers differ in more than windows")
        return cls(
            width=arch.hidden_size,
            heads=arch.num_heads,
            kv_heads=arch.num_kv_heads,
            head_dim=arch.head_dim,
            mlp=arch.mlp_size,
            vocab=arch.vocab_size,
            eps=arch.norm_eps,
            qk_norm=first.qk_norm,
            gelu=first.activation == "gelu_tanh",
            post_norms=first.post_norms,
            query_scalar=first.query_scalar,
            embed_scale=arch.embed_scale,
        )

    def refusal(self) -> str | None:
        """Why the kernels cannot serve these shapes, in one sentence; None if they can."""
        if self.width % 16 or self.mlp % 16 or self.head_dim % 16 or self.vocab % 16:
            return "the CUDA kernels need width, MLP size, head size and vocabulary in multiples of 16"
        if self.head_dim > 256:
            return f"the CUDA kernels serve heads up to 256, not {self.head_dim}"
        if self.post_norms and self.width > 8192:
            return f"the CUDA kernels serve norms behind layers up to a width of 8192, not {self.width}"
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


class Positions(NamedTuple):
    """What a layer makes of positions: cosines and sines [context, head_dim / 2], and how many of them a row sees."""

    cos: NDArray[np.float32]
    sin: NDArray[np.float32]
    window: int = NO_WINDOW


def positions_of(arch: Architecture, context_len: int) -> list[Positions]:
    """One for each layer; those of one RoPE share its tables."""
    tables: dict[Rope, tuple[NDArray[np.float32], NDArray[np.float32]]] = {}
    for rope in {spec.rope for spec in arch.layers}:
        tables[rope] = rope_tables(inverse_frequencies(rope, arch.head_dim), context_len)
    return [Positions(*tables[spec.rope], spec.window or NO_WINDOW) for spec in arch.layers]
