"""A model on the device and one forward over rows: the order of kernels in a pass, and nothing of engines.

`forward` only puts kernels on the current stream; `capture` turns it into a CUDA graph. The caller fills `inputs`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from verispec.backends.cuda.device import Device, Gpu, Graph
from verispec.backends.cuda.kernels import ALL_FEW, MAX_FEW_ROWS, Buffers, Forms, Layer, RowInputs, Starts
from verispec.backends.cuda.product_forms import CACHED_NBYTES, ROWS_PER_TILE, Matrix
from verispec.backends.cuda.quantize import quantized
from verispec.backends.cuda.shapes import SPAN, TILE, Positions, Shapes, gate_up_order, num_parts, qkv_order
from verispec.backends.protocol import FULL_VIEW, View
from verispec.errors import InputError

Tensor: TypeAlias = NDArray[np.float32] | torch.Tensor
Reader = Callable[[str], Tensor]  # by verispec's name; KeyError for what the model does not have


_NARROW = 4  # the last layer ends with the rows whose logits are wanted, if at most one in so many are


class Plan(NamedTuple):
    """What a graph is captured for: rows, how each is attended to, and which form the products take."""

    rows: int
    forms: Forms  # products of our own serve up to MAX_FEW_ROWS rows
    single_rows: int  # rows [0, single_rows) are attended to one by one, the rest in `groups`
    spans: int  # the most spans any row has
    groups: torch.Tensor | None = None  # [G, 2]
    head_rows: int = 0  # 0: the head runs on all rows; -1: on none
    view: View = FULL_VIEW
    starts: Starts | None = None
    hidden: dict[int, torch.Tensor] | None = None  # by layer: where the residual stream before it goes [rows, width]
    drafts: bool = False  # by weights of fewer bits, where the model has them
    busy: torch.Tensor | None = None  # [1] int32, 0 while all rows are padding: then products of few rows are left out


class DeviceModel:
    """Weights, K/V stores, kernels and buffers of one model."""

    def __init__(
        self, shapes: Shapes, positions: Sequence[Positions], read: Reader, *, num_slots: int, max_rows: int,
        context_len: int, tied: bool, device: Device | None = None, max_row_spans: int | None = None,
        head_rows: int | None = None, loaded: Callable[[float], None] | None = None,
        draft_weights: str = "",
    ) -> None:  # fmt: skip
        refusal = shapes.refusal()
        if refusal is not None:
            raise InputError(refusal)
        if draft_weights and not shapes.has_whole_chunks:
            raise InputError("fast_weights need a model whose width, heads and MLP size are multiples of 64")
        self.shapes = shapes
        self.device = device = device or Gpu()
        load = _Loader(shapes, read, device.name)
        self.kernels = device.kernels(shapes)
        self.layers: list[Layer] = []
        self.draft_layers: list[Layer] = []
        for i, here in enumerate(positions):
            self.layers.append(load.layer(i, here))
            if draft_weights:
                self.draft_layers.append(_in_few_bits(self.layers[-1], draft_weights))
            if loaded is not None:
                loaded(i / len(positions))
        self.embed = load.matrix(read("embed"))
        self.final_gain = load.vector(read("final_norm"))
        self.head = self.embed if tied else load.matrix(read("head"))
        self.draft_head = quantized(self.head, draft_weights) if draft_weights else None
        store = (len(positions), num_slots, shapes.kv_heads, shapes.head_dim)
        self.k = torch.zeros(store, dtype=torch.bfloat16, device=device.name)
        self.v = torch.zeros(store, dtype=torch.bfloat16, device=device.name)
        most = max_rows * -(-context_len // SPAN)
        self.buffers = Buffers.of(shapes, max_rows, min(most, max_row_spans or most), device.name)
        self._starts: Starts | None = None
        self.logits = torch.empty(head_rows or max_rows, shapes.vocab, dtype=torch.float32, device=device.name)

    def forward(self, inputs: RowInputs, plan: Plan, row_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of the wanted rows. [head rows, V]"""
        kernels, b, rows, forms, busy = self.kernels, self.buffers, plan.rows, plan.forms, plan.busy
        layers, head = (self.draft_layers, self.draft_head) if plan.drafts else (self.layers, self.head)
        parts = [
            (i, layer, is_attention) for i, layer in enumerate(layers) for is_attention in (True, False)
            if i not in (plan.view.skipped_attention if is_attention else plan.view.skipped_mlp)
        ]  # fmt: skip
        gains = [layer.attn_gain if is_attention else layer.mlp_gain for _, layer, is_attention in parts]
        gains.append(self.final_gain)  # each part leaves its result scaled for the norm behind it
        kernels.embed(self.embed, gains[0], inputs, b, rows, plan.starts)
        hidden, head_rows = dict(plan.hidden or {}), plan.head_rows or rows
        last = max((i for i, _, is_attention in parts if is_attention), default=-1)  # layer whose K and V rows need
        for (i, layer, is_attention), following in zip(parts, gains[1:], strict=True):
            _keep(hidden, i, b.x)
            if is_attention:
                kernels.qkv(layer, self.k[i], self.v[i], inputs, b, rows, many=forms.qkv, busy=busy)
                if i == last and head_rows < 0 and not hidden:
                    break
                self.attend(i, inputs, plan)
                attention, post_gain = b.attention, layer.attn_post_gain
                if i == last and row_ids is not None and 0 < _NARROW * head_rows <= rows and not hidden:
                    attention, rows, row_ids = self._narrowed(row_ids), head_rows, None
                    forms = self.forms(rows, rows, drafts=plan.drafts)
                kernels.residual(attention, layer.o, following, b, rows, many=forms.o, post_gain=post_gain, busy=busy)
            else:
                kernels.gate_up(layer, b, rows, many=forms.gate_up, busy=busy)
                post_gain = layer.mlp_post_gain
                kernels.residual(b.h, layer.down, following, b, rows, many=forms.down, post_gain=post_gain, busy=busy)
        _keep(hidden, len(self.layers), b.x)
        if head_rows > 0:
            assert head is not None
            kernels.head(head, b, self.logits, row_ids, head_rows, many=forms.head, busy=busy)
        return self.logits[: max(0, head_rows)]

    def _narrowed(self, row_ids: torch.Tensor) -> torch.Tensor:
        """Their attention [n, H, d]; the residual stream has them in front. Behind the last attention a row is of use
        only for its own logits, and those of a prompt's rows, but the last one's, nobody wants."""
        ids = row_ids.long()
        self.buffers.x[: len(ids)] = self.buffers.x[ids]
        return self.buffers.attention[ids]

    def starts(self) -> Starts:
        """Room for rows that start from hidden states, made when it is first wanted."""
        if self._starts is None:
            x = self.buffers.x
            self._starts = Starts(torch.full((len(x),), -1, dtype=torch.int32, device=x.device), torch.empty_like(x))
        return self._starts

    def forms(self, rows: int, head_rows: int, *, drafts: bool = False) -> Forms:
        """The quicker form of each product; both have the same bits."""
        if drafts:
            return ALL_FEW
        layer = self.layers[0]
        matrices = (layer.qkv, layer.o, layer.gate_up, layer.down)
        many = [rows > most_few_rows(w) for w in matrices]
        return Forms(*[*many, head_rows > most_few_rows(self.head)])

    def attend(self, layer: int, inputs: RowInputs, plan: Plan) -> None:
        """Attention of all rows, single ones first."""
        k, v, window = self.k[layer], self.v[layer], self.layers[layer].window
        if plan.single_rows:
            self.kernels.attend_rows(
                k, v, inputs, self.buffers, first_row=0, rows=plan.single_rows, spans=plan.spans, window=window,
                drafts=plan.drafts,
            )  # fmt: skip
        if plan.groups is not None:
            self.kernels.attend_groups(
                k, v, inputs, self.buffers, plan.groups, first_row=plan.single_rows, rows=plan.rows - plan.single_rows,
                spans=plan.spans, window=window,
            )  # fmt: skip

    def capture(self, work: Callable[[], object]) -> Graph:
        """A graph of what `work` launches."""
        return self.device.capture(work)


def _keep(hidden: dict[int, torch.Tensor], layer: int, x: torch.Tensor) -> None:
    """Copies the stream for all layers up to this one that have not had it."""
    for i in [i for i in hidden if i <= layer]:
        to = hidden.pop(i)
        to.copy_(x[: len(to)])


def most_few_rows(w: Matrix) -> int:
    """Up to how many rows our own product of these weights is quicker than the library's, as measured on an H200."""
    outputs, columns = w.shape
    if columns % TILE == 0:  # from 9 rows on by wide.cu, which loses to many rows where clusters are large
        return MAX_FEW_ROWS if num_parts(outputs, columns) <= 2 or _is_cached(w) else MAX_FEW_ROWS // 2
    return MAX_FEW_ROWS if _is_cached(w) else ROWS_PER_TILE


def _is_cached(w: Matrix) -> bool:
    return 2 * w.shape[0] * w.shape[1] <= CACHED_NBYTES


def _in_few_bits(layer: Layer, kind: str) -> Layer:
    """The layer with its matrices in numbers of this kind."""
    qkv, o, gate_up, down = (quantized(w, kind) for w in (layer.qkv, layer.o, layer.gate_up, layer.down))
    return replace(layer, qkv=qkv, o=o, gate_up=gate_up, down=down)


class _Loader:
    """Tensors as the kernels want them."""

    def __init__(self, shapes: Shapes, read: Reader, device: str) -> None:
        self._shapes, self._read, self._device = shapes, read, device
        self._tables: dict[int, torch.Tensor] = {}

    def vector(self, values: Tensor) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.float32, device=self._device).contiguous()

    def matrix(self, *values: Tensor) -> torch.Tensor:
        parts = [torch.as_tensor(value, device=self._device).to(torch.bfloat16) for value in values]
        return torch.cat(parts).contiguous()

    def _table(self, values: NDArray[np.float32]) -> torch.Tensor:
        """Layers that have the same table share it."""
        return self._tables.setdefault(id(values), self.vector(values))

    def layer(self, index: int, positions: Positions) -> Layer:
        """One layer's weights."""

        def tensor(name: str) -> Tensor:
            return self._read(f"layers.{index}.{name}")

        def optional(*names: str) -> torch.Tensor | None:
            try:
                return torch.cat([self.vector(tensor(name)) for name in names])
            except KeyError:
                return None

        def ordered(order: NDArray[np.int64], *names: str) -> torch.Tensor:
            at = torch.from_numpy(order).to(self._device)
            return self.matrix(*(tensor(name) for name in names))[at].contiguous()

        return Layer(
            attn_gain=self.vector(tensor("attn_norm")),
            qkv=ordered(qkv_order(self._shapes), "q", "k", "v"),
            qkv_bias=optional("q_bias", "k_bias", "v_bias"),
            q_gain=optional("q_norm"),
            k_gain=optional("k_norm"),
            cos=self._table(positions.cos),
            sin=self._table(positions.sin),
            window=positions.window,
            o=self.matrix(tensor("o")),
            attn_post_gain=optional("attn_post_norm"),
            mlp_gain=self.vector(tensor("mlp_norm")),
            gate_up=ordered(gate_up_order(self._shapes), "gate", "up"),
            down=self.matrix(tensor("down")),
            mlp_post_gain=optional("mlp_post_norm"),
        )
