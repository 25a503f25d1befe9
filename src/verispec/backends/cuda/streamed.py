"""All layers of a pass of few rows on few-bit weights as one kernel, streamed.cu: its form, and what it has of a model.

Layers of few bytes take as long as their kernels take to begin and to end; in one kernel weights go on being read while
blocks wait for each other.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from verispec.backends.cuda.arguments import filled, pointers, struct
from verispec.backends.cuda.product_forms import MAX_BLOCK_NBYTES
from verispec.backends.cuda.quantize import Quantized
from verispec.backends.cuda.shapes import TILE, Shapes

if TYPE_CHECKING:
    from verispec.backends.cuda.kernels import Buffers, Layer, RowInputs

MAX_STREAMED_ROWS = 8
_SPANS = 8  # into which a context is cut, as streamed.cu does
_LAYER_WORDS = 12
_ENDERS, _ATTENDING = 2, 4
_WARPS = range(8, 16 - _ENDERS)  # with one that brings weights 512 threads at most, which have 128 registers each
_MIN_STAGES, _MAX_STAGES = 4, 32
_MOST_OUTPUTS_OF_A_LANE = 32  # of attention: more do not fit into registers

PassArgs = struct(
    "PassArgs",
    *pointers("layers", "words", "num_done", "x", "scaled", "nodes", "table", "positions", "slots", "seq_rows"),
    *pointers("prefix_lens", "ready_lens", "tails", "not_finite", "busy"),
    ("table_width", ctypes.c_longlong),
    ("tail_width", ctypes.c_int),
    ("num_layers", ctypes.c_int),
    ("rows", ctypes.c_int),
    ("eps", ctypes.c_float),
    ("scale", ctypes.c_float),
)


class StreamedForm(NamedTuple):
    """How a block shares its work: streamed.cu says what these are."""

    block_rows: int
    warps: int
    attending: int
    stages: int
    enders: int
    shared: int  # bytes, beside the sums

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * (self.warps + self.enders + 1)


def streamed_form(
    shapes: Shapes, bits: int, rows: int, num_layers: int, num_sms: int, *, warps: int | None = None,
    enders: int = _ENDERS, attending: int = _ATTENDING,
) -> StreamedForm | None:  # fmt: skip
    """The form for passes of so many rows, or None where a block has no room for what it needs."""
    block_rows = next(n for n in (1, 2, 4, 8) if n >= rows)
    columns = (shapes.width, shapes.attention, shapes.width, shapes.mlp)
    outputs = (shapes.qkv, shapes.width, 2 * shapes.mlp, shapes.width)

    def num_steps(count: int) -> int:  # of all tiles
        return sum(n * -(-(k // TILE) // count) for n, k in zip(outputs, columns, strict=True))

    warps = warps or min(_WARPS, key=num_steps)
    most_steps = max(-(-(k // TILE) // warps) for k in columns)
    attended = 4 * (shapes.heads // shapes.kv_heads * shapes.head_dim + 16 * 2 + 16 * 16 + 16)
    residual = -(-shapes.width // 16 // num_sms) * block_rows * 16 * 4
    beside = (
        num_layers * _LAYER_WORDS * 8 + warps * most_steps * block_rows * (TILE + 4) + attending * attended + residual
    )
    sums = warps * enders * 32 * 16
    stage = warps * (128 * bits + 64)
    stages = min(_MAX_STAGES, (MAX_BLOCK_NBYTES - sums - 2048 - beside) // stage)
    if stages < _MIN_STAGES:
        return None
    return StreamedForm(block_rows, warps, attending, stages, enders, stages * stage + beside)


def is_served(shapes: Shapes) -> bool:
    """Whether layers of these shapes are what streamed.cu computes."""
    outputs = shapes.heads // shapes.kv_heads * shapes.head_dim // 32
    plain = not (shapes.qk_norm or shapes.post_norms) and shapes.has_whole_chunks
    return plain and shapes.head_dim in (64, 128) and outputs <= _MOST_OUTPUTS_OF_A_LANE


@dataclass(frozen=True, slots=True)
class Streamed:
    """What the kernel has of a model beside the buffers of a pass. Two passes of it may not run at once."""

    layers: Sequence[Layer]  # of few bits
    table: torch.Tensor  # int64 [layers, 12], the same as the kernel reads it
    words: torch.Tensor  # int64, what blocks give each other
    num_done: torch.Tensor  # int32 [1], layers so far

    @classmethod
    def of(
        cls, layers: Sequence[Layer], final_gain: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shapes: Shapes
    ) -> Streamed:
        """Of these layers, whose K and V are in the stores [layers, slots, KV, d]."""
        gains = [*(layer.attn_gain for layer in layers[1:]), final_gain]
        words = [_words(*each) for each in zip(layers, gains, k, v, strict=True)]
        per_head = _SPANS * (shapes.head_dim // 2 + 2)
        per_row = shapes.width + shapes.width // 8 + shapes.qkv // 2 + shapes.heads * per_head + shapes.mlp // 2
        return cls(
            layers=layers,
            table=torch.tensor(words, dtype=torch.int64, device=k.device),
            words=torch.zeros(MAX_STREAMED_ROWS * per_row, dtype=torch.int64, device=k.device),
            num_done=torch.zeros(1, dtype=torch.int32, device=k.device),
        )

    @property
    def matrix(self) -> Quantized:
        """One of them: all are of one kind."""
        assert isinstance(self.layers[0].qkv, Quantized)
        return self.layers[0].qkv


def _words(layer: Layer, following_gain: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[int]:
    """A layer as streamed.cu has it in memory."""
    bias = 0 if layer.qkv_bias is None else layer.qkv_bias.data_ptr()
    matrices = (layer.qkv, layer.o, layer.gate_up, layer.down)
    tensors = (layer.mlp_gain, following_gain, layer.cos, layer.sin, k, v)
    return [*(w.data_ptr() for w in matrices), bias, *(t.data_ptr() for t in tensors), layer.window]


def streamed_defines(shapes: Shapes, model: Streamed, form: StreamedForm) -> dict[str, int]:
    """What streamed.cu is compiled with."""
    is_gelu = {"GELU": 1} if shapes.gelu else {}
    return {
        "WIDTH": shapes.width, "HEADS": shapes.heads, "KV_HEADS": shapes.kv_heads, "HEAD_DIM": shapes.head_dim,
        "MLP": shapes.mlp, "BITS": model.matrix.bits, "E4M3": int(model.matrix.is_float), **is_gelu,
        "BLOCK_ROWS": form.block_rows, "WARPS": form.warps, "ATTENDING": form.attending, "STAGES": form.stages,
        "ENDERS": form.enders,
    }  # fmt: skip


def pass_args(
    model: Streamed,
    shapes: Shapes,
    inputs: RowInputs,
    b: Buffers,
    rows: int,
    *,
    busy: torch.Tensor | None,
    scale: float,
) -> ctypes.Structure:
    """What a launch is given."""
    return filled(
        PassArgs(), layers=model.table, words=model.words, num_done=model.num_done, x=b.x, scaled=b.scaled,
        nodes=b.nodes, table=inputs.table, positions=inputs.positions, slots=inputs.slots, seq_rows=inputs.seq_rows,
        prefix_lens=inputs.prefix_lens, ready_lens=inputs.ready_lens, tails=inputs.tails, not_finite=b.not_finite,
        busy=busy, table_width=inputs.table.shape[1], tail_width=inputs.tails.shape[1],
        num_layers=len(model.layers), rows=rows, eps=shapes.eps, scale=scale,
    )  # fmt: skip
