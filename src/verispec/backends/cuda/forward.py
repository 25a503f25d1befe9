"""A model on the device and one forward over rows: the order of kernels in a pass, and nothing of engines.

`forward` only puts kernels on the current stream; `capture` turns it into a CUDA graph. The caller fills `inputs`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from verispec.backends.cuda.kernels import NO_WINDOW, Buffers, Forms, Kernels, Layer, RowInputs, undivided_products
from verispec.backends.cuda.shapes import SPAN, Shapes, gate_up_order, qkv_order

Tensor: TypeAlias = NDArray[np.float32] | torch.Tensor
Reader = Callable[[str], Tensor]  # by verispec's name; KeyError for what the model does not have


class Plan(NamedTuple):
    """What a graph is captured for: rows, how each is attended to, and which form the products take."""

    rows: int
    forms: Forms  # products of our own serve up to MAX_FEW_ROWS rows
    single_rows: int  # rows [0, single_rows) are attended to one by one, the rest in `groups`
    spans: int  # the most spans any row has
    groups: torch.Tensor | None = None  # [G, 2]
    head_rows: int = 0  # 0: the head runs on all rows
    window: int = NO_WINDOW


class DeviceModel:
    """Weights, K/V stores, kernels and buffers of one model."""

    def __init__(
        self, shapes: Shapes, num_layers: int, read: Reader, cos: NDArray[np.float32], sin: NDArray[np.float32], *,
        num_slots: int, max_rows: int, context_len: int, tied: bool, cache_folder: Path | None = None,
    ) -> None:  # fmt: skip
        refusal = shapes.refusal()
        if refusal is not None:
            raise ValueError(refusal)
        self.shapes = shapes
        self.kernels = Kernels(shapes, _vector(cos), _vector(sin), cache_folder)
        self.layers = [_layer(shapes, read, i) for i in range(num_layers)]
        self.embed = _matrix(read("embed"))
        self.final_gain = _vector(read("final_norm"))
        self.head = self.embed if tied else _matrix(read("head"))
        store = (num_layers, num_slots, shapes.kv_heads, shapes.head_dim)
        self.k = torch.zeros(store, dtype=torch.bfloat16, device="cuda")
        self.v = torch.zeros(store, dtype=torch.bfloat16, device="cuda")
        self.buffers = Buffers.of(shapes, max_rows, -(-context_len // SPAN))
        self.logits = torch.empty(max_rows, shapes.vocab, dtype=torch.float32, device="cuda")

    def forward(self, inputs: RowInputs, plan: Plan, row_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of the wanted rows. [head rows, V]"""
        kernels, b, rows = self.kernels, self.buffers, plan.rows
        kernels.embed(self.embed, self.layers[0].attn_gain, inputs, b, rows)
        for i, layer in enumerate(self.layers):
            following = self.layers[i + 1].attn_gain if i + 1 < len(self.layers) else self.final_gain
            kernels.qkv(layer, self.k[i], self.v[i], inputs, b, rows, many=plan.forms.qkv)
            self.attend(i, inputs, plan)
            kernels.residual(b.attention, layer.o, layer.mlp_gain, b, rows, many=plan.forms.o)
            kernels.gate_up(layer, b, rows, many=plan.forms.gate_up)
            kernels.residual(b.h, layer.down, following, b, rows, many=plan.forms.down)
        head_rows = plan.head_rows or rows
        kernels.head(self.head, b, self.logits, row_ids, head_rows, many=plan.forms.head)
        return self.logits[:head_rows]

    def attend(self, layer: int, inputs: RowInputs, plan: Plan) -> None:
        """Attention of all rows, single ones first."""
        k, v, window = self.k[layer], self.v[layer], plan.window
        if plan.single_rows:
            self.kernels.attend_rows(
                k, v, inputs, self.buffers, first_row=0, rows=plan.single_rows, spans=plan.spans, window=window
            )
        if plan.groups is not None:
            self.kernels.attend_groups(
                k, v, inputs, self.buffers, plan.groups, first_row=plan.single_rows, rows=plan.rows - plan.single_rows,
                spans=plan.spans, window=window,
            )  # fmt: skip

    def capture(self, work: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """A graph of what `work` launches. It runs once before, so that everything is compiled and loaded."""
        with undivided_products():
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                work()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                work()
        return graph


def _vector(values: Tensor) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.float32, device="cuda").contiguous()


def _matrix(*values: Tensor) -> torch.Tensor:
    return torch.cat([torch.as_tensor(value, device="cuda").to(torch.bfloat16) for value in values]).contiguous()


def _layer(shapes: Shapes, read: Reader, index: int) -> Layer:
    def tensor(name: str) -> Tensor:
        return read(f"layers.{index}.{name}")

    def optional(*names: str) -> torch.Tensor | None:
        try:
            return torch.cat([_vector(tensor(name)) for name in names])
        except KeyError:
            return None

    def ordered(order: NDArray[np.int64], *names: str) -> torch.Tensor:
        return _matrix(*(tensor(name) for name in names))[torch.from_numpy(order).cuda()].contiguous()

    return Layer(
        attn_gain=_vector(tensor("attn_norm")),
        qkv=ordered(qkv_order(shapes), "q", "k", "v"),
        qkv_bias=optional("q_bias", "k_bias", "v_bias"),
        q_gain=optional("q_norm"),
        k_gain=optional("k_norm"),
        o=_matrix(tensor("o")),
        mlp_gain=_vector(tensor("mlp_norm")),
        gate_up=ordered(gate_up_order(shapes), "gate", "up"),
        down=_matrix(tensor("down")),
    )
