"""A whole model in the arithmetic of the CUDA kernels, in numpy: what a CPU needs to derive a GPU's bits again.

Written to be compared, not to be fast: a tiny model's pass takes a second. Weights come under verispec's names in their
natural order; matrices are rounded to bf16 here, as the device's are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from verispec.backends.cuda.bits import Float32, bf16, chain, exp2, fused, gelu, norm_factor, product, silu, tree
from verispec.backends.cuda.shapes import SPAN, TILE, Positions, Shapes, num_parts

Int64 = NDArray[np.int64]
Reader = Callable[[str], Float32]
_NEG_INF = np.float32(-np.inf)
_LOG2E = 1.4426950408889634


def softmax_scale(query_scalar: float) -> np.float32:
    """log2(e) / sqrt(query_scalar), rounded once."""
    return np.float32(_LOG2E / float(np.sqrt(np.float64(query_scalar))))


@dataclass(frozen=True, slots=True)
class Context:
    """What each row attends to: its slots in the order of positions, padded, and how many of them."""

    slots: Int64  # [M, longest]
    lens: Int64  # [M]


def linear(x: Float32, w: Float32) -> Float32:
    """Y = bf16(y)"""
    return bf16(product(x, w, num_parts(w.shape[0], w.shape[1])))


def row_factor(x: Float32, eps: float) -> Float32:
    """The norm's factor of each row of the residual stream. [M, 1]"""
    return norm_factor(tree(x * x), x.shape[-1], eps)[:, None]


def rotate(v: Float32, cos: Float32, sin: Float32) -> Float32:
    """RoPE on [M, heads, d] by one product and one fused operation each; cos and sin are [M, 1, d / 2]."""
    half = v.shape[-1] // 2
    first, second = v[..., :half], v[..., half:]
    return np.concatenate([fused(-second, sin, first * cos), fused(first, sin, second * cos)], axis=-1)


def _weights(s: Float32, m: Float32) -> Float32:
    safe = np.where(np.isneginf(m), np.float32(0), m)
    return np.where(np.isneginf(m), np.float32(0), exp2(s - safe))


def _decay(m: Float32, following: Float32) -> Float32:
    safe = np.where(np.isneginf(following), np.float32(0), following)
    return np.where(np.isneginf(following), np.float32(1), exp2(m - safe))


def attention(
    q: Float32, k: Float32, v: Float32, context: Context, *, window: int, query_scalar: float | None = None
) -> Float32:
    """q [M, H, d] over stores k, v [slots, KV, d]: tiles of 64 within spans of 256, spans merged ascending."""
    scale = softmax_scale(query_scalar or q.shape[-1])
    rows, heads, size = q.shape
    kv_heads = k.shape[1]
    q = q.reshape(rows, kv_heads, heads // kv_heads, size)
    longest = int(context.lens.max())
    state = (np.full((*q.shape[:3], 1), _NEG_INF), np.zeros((*q.shape[:3], 1), np.float32), np.zeros_like(q))
    for begin in range(0, longest, SPAN):
        span = _span(q, k, v, context, range(begin, min(begin + SPAN, longest), TILE), window, scale)
        state = _merged(state, span)
    _, total, value = state
    return bf16(value / total).reshape(rows, heads, size)


State = tuple[Float32, Float32, Float32]  # maximum, sum of weights, weighted sum: [M, KV, group, 1 or d]


def _span(q: Float32, k: Float32, v: Float32, context: Context, tiles: range, window: int, scale: np.float32) -> State:
    m = np.full((*q.shape[:3], 1), _NEG_INF)
    total = np.zeros((*q.shape[:3], 1), np.float32)
    value = np.zeros_like(q)
    for first in tiles:
        j = np.arange(first, first + TILE)
        lens = context.lens[:, None]
        seen = (j < lens) & (j >= lens - window)  # [M, 64]
        slots = context.slots[:, np.minimum(j, context.slots.shape[1] - 1)]
        keys = np.where((j < lens)[..., None, None], k[slots], np.float32(0)).transpose(0, 2, 1, 3)  # [M, KV, 64, d]
        values = np.where((j < lens)[..., None, None], v[slots], np.float32(0)).transpose(0, 2, 3, 1)  # [M, KV, d, 64]
        s = np.where(seen[:, None, None, :], chain(q, keys) * scale, _NEG_INF)
        following = np.maximum(m, s.max(axis=-1, keepdims=True))
        p, by = bf16(_weights(s, following)), _decay(m, following)
        value = chain(p, values, value * by)
        total = chain(p, np.ones((1, TILE), np.float32), total * by)
        m = following
    return m, total, value


def _merged(state: State, span: State) -> State:
    m, total, value = state
    m_new, total_new, value_new = span
    top = np.maximum(m, m_new)
    by, by_new = _decay(m, top), _decay(m_new, top)
    both = (top, total * by + total_new * by_new, value * by + value_new * by_new)
    skip, first = np.isneginf(m_new), np.isneginf(m)
    parts = [
        np.where(skip, old, np.where(first, new, mixed)) for old, new, mixed in zip(state, span, both, strict=True)
    ]
    return parts[0], parts[1], parts[2]


class BitModel:
    """Weights and K/V stores of one model; `forward` writes the rows' K/V and gives every step's result."""

    def __init__(
        self, shapes: Shapes, positions: Sequence[Positions], read: Reader, *, num_slots: int, tied: bool
    ) -> None:
        self.shapes, self._read, self._positions = shapes, read, positions
        self._head = "embed" if tied else "head"
        store = (len(positions), num_slots, shapes.kv_heads, shapes.head_dim)
        self.k, self.v = np.zeros(store, np.float32), np.zeros(store, np.float32)
        self.steps: dict[str, Float32] = {}

    def _matrix(self, *names: str) -> Float32:
        return bf16(np.concatenate([self._read(name) for name in names]))

    def forward(self, token_ids: Int64, positions: Int64, slots: Int64, context: Context) -> Float32:
        """Logits of all rows [M, V]; `steps` holds what each kernel of the pass gave."""
        x = bf16(bf16(self._read("embed"))[token_ids] * np.float32(self.shapes.embed_scale))
        for i in range(len(self._positions)):
            at = f"layers.{i}."
            x = bf16(x + self._normed(self._attend(i, at, x, positions, slots, context), at + "attn_post_norm"))
            self.steps[at + "attended"] = x
            x = bf16(x + self._normed(self._mlp(at, x), at + "mlp_post_norm"))
            self.steps[at + "x"] = x
        y = product(self._scaled(x, "final_norm"), self._matrix(self._head), 1)
        self.steps["logits"] = y * row_factor(x, self.shapes.eps)
        return self.steps["logits"]

    def _scaled(self, x: Float32, norm: str) -> Float32:
        return bf16(x * self._read(norm))

    def _normed(self, y: Float32, name: str) -> Float32:
        """Behind a layer, where the model has such a norm."""
        return (y * row_factor(y, self.shapes.eps)) * self._read(name) if self.shapes.post_norms else y

    def _attend(self, layer: int, at: str, x: Float32, positions: Int64, slots: Int64, context: Context) -> Float32:
        shapes, eps, here = self.shapes, self.shapes.eps, self._positions[layer]
        y = linear(self._scaled(x, at + "attn_norm"), self._matrix(at + "q", at + "k", at + "v"))
        heads = (y * row_factor(x, eps)).reshape(len(x), -1, shapes.head_dim)
        if self._has(at + "q_bias"):
            heads = heads + np.concatenate([self._read(at + n + "_bias") for n in "qkv"]).reshape(heads.shape[1:])
        q, k, v = np.split(heads, (shapes.heads, shapes.heads + shapes.kv_heads), axis=1)
        if shapes.qk_norm:
            q, k = (self._head_norm(part, at + name) for part, name in ((q, "q_norm"), (k, "k_norm")))
        cos, sin = here.cos[positions][:, None], here.sin[positions][:, None]
        q, k, v = bf16(rotate(q, cos, sin)), bf16(rotate(k, cos, sin)), bf16(v)
        self.k[layer, slots], self.v[layer, slots] = k, v
        self.steps[at + "q"], self.steps[at + "k"], self.steps[at + "v"] = q, k, v
        out = attention(q, self.k[layer], self.v[layer], context, window=here.window, query_scalar=shapes.query_scalar)
        self.steps[at + "attention"] = out
        return linear(out.reshape(len(x), -1), self._matrix(at + "o"))

    def _head_norm(self, v: Float32, name: str) -> Float32:
        return (v * norm_factor(tree(v * v), v.shape[-1], self.shapes.eps)[..., None]) * self._read(name)

    def _mlp(self, at: str, x: Float32) -> Float32:
        scaled, s = self._scaled(x, at + "mlp_norm"), row_factor(x, self.shapes.eps)
        y = linear(scaled, self._matrix(at + "gate", at + "up"))
        gate, up = y[:, : self.shapes.mlp] * s, y[:, self.shapes.mlp :] * s
        h = bf16((gelu if self.shapes.gelu else silu)(gate) * up)
        self.steps[at + "h"] = h
        return linear(h, self._matrix(at + "down"))

    def _has(self, name: str) -> bool:
        try:
            self._read(name)
        except KeyError:
            return False
        return True
