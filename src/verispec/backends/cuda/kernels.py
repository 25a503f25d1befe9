"""The kernels as Python calls on torch tensors: one method per step of a pass, in two forms with the same bits.

`few` runs a linear layer and what follows it as one kernel of ours (up to 64 rows). `many` takes the product from
cuBLASLt, batched over the parts of K, and finishes it in a small kernel; or, where there are several parts and rows
enough, it is one kernel of ours again. Every call only puts work on torch's current
stream, so all of them can be captured into a CUDA graph. Buffers belong to the caller.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

from verispec.backends.cuda.arguments import current_stream, filled, pointers, struct
from verispec.backends.cuda.bit_model import softmax_scale
from verispec.backends.cuda.compiler import NOT_KEPT, Cubins, Kernel, Modules
from verispec.backends.cuda.product_forms import (
    ALONE_NBYTES,
    LARGE_GROUP,
    LARGE_ROW_TILE,
    LARGE_THREADS,
    MAX_BLOCK_NBYTES,
    WIDE_THREADS,
    DraftForm,
    Kind,
    Matrix,
    draft_form,
    draft_rows,
    is_large,
    is_wide,
    large_form,
    linear_form,
    wide_form,
    wide_rows,
)
from verispec.backends.cuda.quantize import Quantized
from verispec.backends.cuda.shapes import SPAN, TILE, Shapes, num_parts
from verispec.backends.cuda.tensor_map import TensorMap

MAX_FEW_ROWS = 64
_MAX_ROW_THREADS = 256
WHOLE_GROUPS_PER_SM = 4  # with so many blocks in a launch, a block of prompt attention takes all spans of its rows
# Spans of a row whose blocks merge them through shared memory: so many, or fewer, if many rows take all SMs.
_MAX_CLUSTER, _FREE_CLUSTER = 8, 4
_SPAN_OTHER_NBYTES = 2048  # what such a block has beside
DRAFT_SPANS, _MAX_SPREAD_ROWS = (64, 128), 4  # positions of a block, the best first, for up to so many rows of drafts
# With so many blocks to an SM, one has all spans of a row, if they are few: else all would wait for the longest row.
_WHOLE_ROWS_PER_SM, _MAX_WHOLE_SPANS = 1.5, 8
# Of its ring: two blocks share an SM at heads of 128, four at 64. And what it has beside the ring and the slots.
_WHOLE_TILES, _WHOLE_OTHER_NBYTES = 3, 4096


_KV = ("cosines", "sines", "positions", "slots", "k_store", "v_store", "not_finite")
LinearArgs = struct(
    "LinearArgs",
    *pointers("x", "w", "nodes_in", "out", "bias", *_KV, "gain", "scaled", "nodes_out", "row_ids", "busy"),
    ("eps", ctypes.c_float),
    ("rows", ctypes.c_int),
)


class WideArgs(ctypes.Structure):
    """Arguments of wide.cu: 64 bytes are its structure's alignment."""

    _fields_ = [
        ("weights", TensorMap),
        ("rows", TensorMap),
        ("layer", LinearArgs),
        ("unused", ctypes.c_byte * (-ctypes.sizeof(LinearArgs) % 64)),
    ]


class LargeArgs(ctypes.Structure):
    """Arguments of large.cu: 64 bytes are its structure's alignment."""

    _fields_ = [
        ("weights", TensorMap),
        ("rows", TensorMap),
        ("layer", LinearArgs),
        ("factors", ctypes.c_void_p),
        ("unused", ctypes.c_byte * (-(ctypes.sizeof(LinearArgs) + 8) % 64)),
    ]


RowArgs = struct(
    "RowArgs",
    *pointers("y", "nodes_in", "out", "bias", "q_gain", "k_gain", "post_gain", *_KV),
    *pointers("gain", "scaled", "nodes_out", "row_ids", "table", "state_ids", "states"),
    ("eps", ctypes.c_float),
    ("embed_scale", ctypes.c_float),
    ("rows", ctypes.c_int),
    ("width", ctypes.c_int),
)
AttentionArgs = struct(
    "AttentionArgs",
    *pointers("q", "k_store", "v_store", "out", "table", "positions", "seq_rows", "prefix_lens", "tails"),
    *pointers("ready_lens", "groups", "partial", "arrived"),
    ("table_width", ctypes.c_longlong),
    ("tail_width", ctypes.c_int),
    ("first_row", ctypes.c_int),
    ("spans", ctypes.c_int),
    ("window", ctypes.c_int),
    ("scale", ctypes.c_float),
)


class Forms(NamedTuple):
    """Which form each product of a pass takes: True is `many`. The bits are the same, so the choice is free."""

    qkv: bool
    o: bool
    gate_up: bool
    down: bool
    head: bool


ALL_FEW, ALL_MANY = Forms(*[False] * 5), Forms(*[True] * 5)


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer on the device: matrices in bf16, or in fewer bits, rows in the kernels' order; vectors in
    float32. Products of fewer bits are for drafts: they have one form, for any number of rows, and promise no bits.
    """

    attn_gain: torch.Tensor  # [width]
    qkv: Matrix  # [(H + 2 KV) d, width] in `qkv_order`
    qkv_bias: torch.Tensor | None  # [(H + 2 KV) d] in natural order
    q_gain: torch.Tensor | None  # [d]
    k_gain: torch.Tensor | None
    cos: torch.Tensor  # [context, d / 2]
    sin: torch.Tensor
    window: int
    o: Matrix  # [width, H d]
    attn_post_gain: torch.Tensor | None  # [width]
    mlp_gain: torch.Tensor
    gate_up: Matrix  # [2 mlp, width] in `gate_up_order`
    down: Matrix  # [width, mlp]
    mlp_post_gain: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class RowInputs:
    """What a pass says of its rows, int32 on the device, at least as long as the pass has rows.

    Kernels read all of it, and K/V of positions below `ready_lens`, before the kernel in front of them has ended. So it
    may change only between the last kernel of a pass and the next `embed`, which waits for everything before it.
    """

    token_ids: torch.Tensor  # [M]
    positions: torch.Tensor  # [M]
    slots: torch.Tensor  # [M]
    seq_rows: torch.Tensor  # [M]
    prefix_lens: torch.Tensor  # [M]
    ready_lens: torch.Tensor  # [M] how much of the row's context was written before this pass
    tails: torch.Tensor  # [M, D]
    table: torch.Tensor  # [sequence rows, context]


class Starts(NamedTuple):
    """Rows that start from a hidden state: its index for each row of a pass, -1 for the others."""

    ids: torch.Tensor  # [M] int32
    states: torch.Tensor  # [M, width] bf16


@dataclass(frozen=True, slots=True)
class Buffers:
    """Where the steps of a pass leave their results, for up to `rows` rows."""

    x: torch.Tensor  # [M, width] bf16, the residual stream
    scaled: torch.Tensor  # [M, width] bf16, x times the next norm's weight
    nodes: torch.Tensor  # [M, width / 16] float32, sums of 16 squares of x
    q: torch.Tensor  # [M, H, d] bf16
    attention: torch.Tensor  # [M, H, d] bf16
    h: torch.Tensor  # [M, mlp] bf16
    products: torch.Tensor  # float32, the products of `many`
    factors: torch.Tensor  # [M] float32, of the norm
    partial: torch.Tensor  # float32, results of spans
    arrived: torch.Tensor  # [M, KV] int32, zeros between launches
    not_finite: torch.Tensor  # [M] int32, 1 where a row's K or V was not finite

    @classmethod
    def of(cls, shapes: Shapes, rows: int, row_spans: int, device: str) -> Buffers:
        """Allocate them. `row_spans` is the most rows times spans of one pass."""

        def empty(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        layers = ((shapes.qkv, shapes.width), (shapes.width, shapes.attention), (2 * shapes.mlp, shapes.width))
        widest = max(_product_words(n, num_parts(n, k)) for n, k in (*layers, (shapes.width, shapes.mlp)))
        group = shapes.heads // shapes.kv_heads
        return cls(
            x=empty(rows, shapes.width),
            scaled=empty(rows, shapes.width),
            nodes=empty(rows, shapes.width // 16, dtype=torch.float32),
            q=empty(rows, shapes.heads, shapes.head_dim),
            attention=empty(rows, shapes.heads, shapes.head_dim),
            h=empty(rows, shapes.mlp),
            products=empty(rows * widest, dtype=torch.float32),
            factors=empty(rows, dtype=torch.float32),
            partial=empty(row_spans * shapes.kv_heads * group * (shapes.head_dim + 2), dtype=torch.float32),
            arrived=torch.zeros(rows, shapes.kv_heads, dtype=torch.int32, device=device),
            not_finite=torch.zeros(rows, dtype=torch.int32, device=device),
        )


def _product_words(outputs: int, parts: int) -> int:
    """Of one row: one part is kept as bf16, several as float32."""
    return parts * outputs if parts > 1 else -(-outputs // 2)


class SpanForm(NamedTuple):
    """How blocks share the spans of single rows: attention.cu says what these are."""

    two_buffers: bool
    cluster: int
    shared: int  # bytes


@contextmanager
def undivided_products() -> Iterator[None]:
    """cuBLASLt without split-K: its products then are the canonical chains. Process-wide, so restored at the end."""
    before_library = torch.backends.cuda.preferred_blas_library()
    matmul = torch.backends.cuda.matmul
    before_reduction = matmul.allow_bf16_reduced_precision_reduction
    torch.backends.cuda.preferred_blas_library("cublaslt")
    matmul.allow_bf16_reduced_precision_reduction = (False, False)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before_library)
        matmul.allow_bf16_reduced_precision_reduction = before_reduction


def _by_parts(x: torch.Tensor, w: torch.Tensor, parts: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """The products of each part of K. [parts, rows, outputs] float32"""
    left = x.unflatten(1, (parts, -1)).transpose(0, 1)  # [parts, rows, K / parts]
    right = w.unflatten(1, (parts, -1)).permute(1, 2, 0)  # [parts, K / parts, outputs]
    return torch.bmm(left, right, out_dtype=torch.float32, **({} if out is None else {"out": out}))


def tree_of_parts(parts: list[torch.Tensor]) -> torch.Tensor:
    """p0, or p0 + p1, or (p0 + p1) + p2, or (p0 + p1) + (p2 + p3)."""
    while len(parts) > 1:
        parts = [*(a + b for a, b in zip(parts[::2], parts[1::2], strict=False)), *parts[len(parts) // 2 * 2 :]]
    return parts[0]


class Kernels:
    """All kernels of one model on the current device; compiled when first used, if `cubins` does not have them."""

    def __init__(self, shapes: Shapes, cubins: Cubins = NOT_KEPT) -> None:
        self.shapes = shapes
        self._modules = Modules(cubins)
        self._kernels: dict[tuple[object, ...], Kernel] = {}
        self._sizes = {"WIDTH": shapes.width, "HEADS": shapes.heads, "KV_HEADS": shapes.kv_heads}
        self._sizes |= {"HEAD_DIM": shapes.head_dim, **({"GELU": 1} if shapes.gelu else {})}
        self._scale = float(softmax_scale(shapes.query_scalar or shapes.head_dim))
        self.whole_rows: bool | None = None  # which form `attend_rows` takes; None: the quicker one. For checks
        self.own_large = True  # whether large.cu serves where it can. For checks
        self.draft_form, self.draft_spans = draft_form, DRAFT_SPANS  # others are bench.draft_forms's
        self._tile_nbytes = 2 * TILE * shapes.head_dim * 2  # of K and V
        self.num_sms: int = torch.cuda.get_device_properties("cuda").multi_processor_count

    # Steps of a pass. `b` is written, `rows` is M. Products of few rows are left out while `busy`, one word, is 0.

    def embed(
        self, table: torch.Tensor, gain: torch.Tensor, inputs: RowInputs, b: Buffers, rows: int,
        starts: Starts | None = None,
    ) -> None:  # fmt: skip
        """x, scaled and nodes of the first layer. It fences a pass from the one before it."""
        args = filled(
            RowArgs(), out=b.x, gain=gain, scaled=b.scaled, nodes_out=b.nodes, row_ids=inputs.token_ids, table=table,
            rows=rows, not_finite=b.not_finite, embed_scale=self.shapes.embed_scale,
            state_ids=starts and starts.ids, states=starts and starts.states,
        )  # fmt: skip
        self._rows_kernel("embed_rows", 1).launch(self._eighths(rows), 128, args, stream=current_stream())

    def qkv(
        self, layer: Layer, k: torch.Tensor, v: torch.Tensor, inputs: RowInputs, b: Buffers, rows: int, *, many: bool,
        busy: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """q, and the rows' K and V into the stores [slots, KV, d]."""
        shapes = self.shapes
        common = {
            "nodes_in": b.nodes, "out": b.q, "bias": layer.qkv_bias, "positions": inputs.positions,
            "slots": inputs.slots, "k_store": k, "v_store": v, "not_finite": b.not_finite, "rows": rows,
            "eps": shapes.eps, "cosines": layer.cos, "sines": layer.sin,
        }  # fmt: skip
        if not many and not shapes.qk_norm:
            self._linear(Kind.QKV, layer.qkv, rows, filled(LinearArgs(), x=b.scaled, w=layer.qkv, busy=busy, **common))
            return
        if many and not shapes.qk_norm and self._is_large(layer.qkv, rows):
            self._large(Kind.QKV, layer.qkv, rows, filled(LinearArgs(), x=b.scaled, **common), b)
            return
        if many:
            y, parts = self._product(b.scaled[:rows], layer.qkv, b)
        else:  # a q/k norm needs whole heads
            y, parts = self._plain(b.scaled, layer.qkv, b, rows, busy)
        args = filled(RowArgs(), y=y, q_gain=layer.q_gain, k_gain=layer.k_gain, **common)
        self._row_by_row("qkv_rows", parts, rows, shapes.qkv // 16, args)

    def attend_rows(
        self, k: torch.Tensor, v: torch.Tensor, inputs: RowInputs, b: Buffers, *, first_row: int, rows: int, spans: int,
        window: int, drafts: bool = False,
    ) -> None:  # fmt: skip
        """Attention of rows of any kind, each by itself; `spans` is at least what the longest of them needs. More
        blocks may share the context of rows of `drafts`, which changes bits."""
        args = self._attention_args(k, v, inputs, b, window)
        span = self.draft_span(rows, spans) if drafts else SPAN
        spans = spans * SPAN // span
        filled(args, first_row=first_row, spans=spans)
        if span == SPAN and self._takes_whole_rows(rows, spans):
            shared, grid = self._whole_nbytes(spans), (self.shapes.kv_heads, rows, 1)
            threads = 256 if self.shapes.head_dim > 64 else 128
            self._attention_kernel("attention_whole").launch(
                grid, threads, args, stream=current_stream(), shared=shared
            )
            return
        grid = (spans, self.shapes.kv_heads, rows)  # short spans run beside whole ones
        form = self._span_form(rows, spans, span)
        kernel = self._attention_kernel(
            "attention_rows", two_buffers=form.two_buffers, cluster=form.cluster > 1, span=span
        )
        kernel.launch(grid, 256, args, stream=current_stream(), shared=form.shared, cluster=form.cluster)

    def draft_span(self, rows: int, spans: int) -> int:
        """Positions of a block of rows of drafts: few, where a cluster has them all, so that they need no memory, and
        each of its blocks an SM to itself."""
        for span in self.draft_spans if rows <= _MAX_SPREAD_ROWS else ():
            count = spans * SPAN // span
            if rows * self.shapes.kv_heads * count <= self.num_sms and self._span_form(rows, count, span).cluster > 1:
                return span
        return SPAN

    def _span_form(self, rows: int, spans: int, span: int = SPAN) -> SpanForm:
        store, weights = span * self.shapes.head_dim * 2, 16 * (span + 8) * 2
        two_buffers = rows * self.shapes.kv_heads * spans <= 2 * self.num_sms
        two_buffers &= 2 * store + weights <= MAX_BLOCK_NBYTES
        shared = (2 if two_buffers else 1) * store + weights
        gathered = shared + self._gathered_nbytes
        fits = spans <= _FREE_CLUSTER or rows * self.shapes.kv_heads * spans * shared <= self.num_sms * ALONE_NBYTES
        fits &= gathered + _SPAN_OTHER_NBYTES <= MAX_BLOCK_NBYTES
        cluster = spans if two_buffers and fits and 1 < spans <= _MAX_CLUSTER else 1
        return SpanForm(two_buffers, cluster, gathered if cluster > 1 else shared)

    @property
    def _gathered_nbytes(self) -> int:
        """What a block of a cluster has for what others find."""
        group = self.shapes.heads // self.shapes.kv_heads
        turns = -(-group * self.shapes.head_dim // 256) + _MAX_CLUSTER - 1
        return -(-(turns * 256 + 2 * _MAX_CLUSTER * group) * 4 // 128) * 128

    def rows_form(self, rows: int, spans: int) -> str:
        """How `attend_rows` shares the work of so many rows."""
        if self._takes_whole_rows(rows, spans):
            return "a block for each row"
        form = self._span_form(rows, spans)
        if form.cluster > 1:
            return "a cluster for each row"
        return f"a block for each span{', two buffers' if form.two_buffers else ''}"

    @property
    def rows_per_group(self) -> int:
        """The most rows of one group of `attend_groups`."""
        return 64 // (self.shapes.heads // self.shapes.kv_heads)

    def attends_whole(self, num_groups: int, spans: int) -> bool:
        """Whether blocks of so many groups take all spans of their rows, and leave nothing to merge."""
        return spans == 1 or num_groups * self.shapes.kv_heads >= WHOLE_GROUPS_PER_SM * self.num_sms

    def attend_groups(
        self, k: torch.Tensor, v: torch.Tensor, inputs: RowInputs, b: Buffers, groups: torch.Tensor, *, first_row: int,
        rows: int, spans: int, window: int,
    ) -> None:  # fmt: skip
        """Attention of `rows` rows from `first_row` on, in groups [G, 2] (first row, number of rows): rows of one
        sequence whose contexts are prefixes of the last one's, in ascending order of position."""
        args = self._attention_args(k, v, inputs, b, window)
        filled(args, groups=groups, first_row=first_row, spans=spans)
        shared = 2 * self._tile_nbytes
        whole = self.attends_whole(len(groups), spans)
        grid = (len(groups), self.shapes.kv_heads, 1 if whole else spans)
        kernel = self._attention_kernel("attention_groups", whole=whole)
        kernel.launch(grid, 128, args, stream=current_stream(), shared=shared)
        if not whole:
            merge = self._attention_kernel("attention_merge")
            merge.launch((rows, self.shapes.kv_heads, 1), 128, args, stream=current_stream())

    def residual(
        self, x: torch.Tensor, w: Matrix, gain: torch.Tensor, b: Buffers, rows: int, *, many: bool,
        post_gain: torch.Tensor | None = None, busy: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Output and down products of `x`, added to the residual stream; scaled and nodes for the norm that follows.

        With `post_gain` the products themselves go through a norm first.
        """
        common = {"out": b.x, "gain": gain, "scaled": b.scaled, "nodes_out": b.nodes, "rows": rows}
        if not many and post_gain is None:
            self._linear(Kind.RESIDUAL, w, rows, filled(LinearArgs(), x=x, w=w, busy=busy, **common))
            return
        if many and post_gain is None and self._is_large(w, rows):
            self._large(Kind.RESIDUAL, w, rows, filled(LinearArgs(), x=x, **common))
            return
        if many:
            y, parts = self._product(x.view(-1, w.shape[1])[:rows], w, b)
        else:  # that norm needs whole rows
            y, parts = self._plain(x, w, b, rows, busy)
        args = filled(RowArgs(), y=y, post_gain=post_gain, eps=self.shapes.eps, **common)
        if post_gain is None:
            self._rows_kernel("residual_rows", parts).launch(self._eighths(rows), 128, args, stream=current_stream())
        else:
            threads = -(-self.shapes.width // (8 * 32)) * 32
            self._rows_kernel("post_norm_rows", parts).launch((rows, 1, 1), threads, args, stream=current_stream())

    def gate_up(self, layer: Layer, b: Buffers, rows: int, *, many: bool, busy: torch.Tensor | None = None) -> None:
        """h = activation(gate) up"""
        common = {"nodes_in": b.nodes, "out": b.h, "rows": rows, "eps": self.shapes.eps}
        if not many:
            args = filled(LinearArgs(), x=b.scaled, w=layer.gate_up, busy=busy, **common)
            self._linear(Kind.GATE_UP, layer.gate_up, rows, args)
            return
        if self._is_large(layer.gate_up, rows):  # of narrow models
            self._large(Kind.GATE_UP, layer.gate_up, rows, filled(LinearArgs(), x=b.scaled, **common), b)
            return
        y, parts = self._product(b.scaled[:rows], layer.gate_up, b)
        args = filled(RowArgs(), y=y, **common)
        self._row_by_row("gate_up_rows", parts, rows, self.shapes.mlp // 8, args)

    def plain(self, x: torch.Tensor, w: torch.Tensor, *, many: bool) -> torch.Tensor:
        """Y = bf16(y) of any product, in either form: for the audit."""
        if many and self._is_large(w, len(x)):
            out = torch.empty(len(x), len(w), dtype=torch.bfloat16, device=x.device)
            self._large(Kind.PLAIN, w, len(x), filled(LinearArgs(), x=x, out=out, rows=len(x)))
            return out
        if many:
            parts = num_parts(*w.shape)
            return torch.mm(x, w.t()) if parts == 1 else tree_of_parts(list(_by_parts(x, w, parts))).to(torch.bfloat16)
        out = torch.empty(len(x), len(w), dtype=torch.bfloat16, device=x.device)
        self._linear(Kind.PLAIN, w, len(x), filled(LinearArgs(), x=x, w=w, out=out, rows=len(x)))
        return out

    def head(
        self, w: Matrix, b: Buffers, logits: torch.Tensor, row_ids: torch.Tensor | None, rows: int, *, many: bool,
        busy: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Logits [rows, V] float32 of these rows of the pass (all of them where `row_ids` is None)."""
        common = {"nodes_in": b.nodes, "out": logits, "row_ids": row_ids, "rows": rows, "eps": self.shapes.eps}
        if not many:
            x, takes_neighbours = b.scaled, not isinstance(w, Quantized) and is_wide(w, rows)  # by the copy engine
            if row_ids is not None and takes_neighbours:
                x = x[row_ids.long()]
                common |= {"nodes_in": b.nodes[row_ids.long()], "row_ids": None}
            self._linear(Kind.HEAD, w, rows, filled(LinearArgs(), x=x, w=w, busy=busy, **common))
            return
        assert isinstance(w, torch.Tensor)
        x = b.scaled[:rows] if row_ids is None else b.scaled[row_ids.long()]
        torch.mm(x, w.t(), out_dtype=torch.float32, out=logits[:rows])
        args = filled(RowArgs(), width=w.shape[0], **common)
        grid = (rows, -(-w.shape[0] // 4096), 1)
        self._rows_kernel("head_rows", 1).launch(grid, 256, args, stream=current_stream())

    # How they are put together.

    def _quantized(self, kind: Kind, w: Quantized, rows: int, args: ctypes.Structure) -> None:
        outputs, columns = w.shape
        row_tile = draft_rows(columns, rows)
        form = self.draft_form(kind, w.shape, w.bits, row_tile, self.num_sms)
        grid = (min(outputs // 16, form.per_sm * self.num_sms), -(-rows // row_tile), 1)
        defines = self.draft_defines(kind, w.shape, w.bits, row_tile, form, is_float=w.is_float)
        kernel = self._kernel("quantized.cu", "quantized", defines)
        kernel.launch(grid, 32 * (form.warps + form.enders), args, stream=current_stream(), shared=form.shared)

    def draft_defines(
        self, kind: Kind, w: tuple[int, ...], bits: int, row_tile: int, form: DraftForm, *, is_float: bool = False
    ) -> dict[str, int]:
        """What quantized.cu is compiled with, for a matrix [outputs, columns]."""
        return {
            "KIND": int(kind), "N": w[0], "K": w[1], "BITS": bits, "E4M3": int(is_float), "BLOCK_ROWS": row_tile,
            "WARPS": form.warps, "STAGES": form.stages, "STEP": form.step, "LATE": form.late, "ENDERS": form.enders,
            "AMONG": form.among, **self._sizes,
        }  # fmt: skip

    def _wide(self, kind: Kind, w: torch.Tensor, parts: int, rows: int, args: ctypes.Structure) -> None:
        assert rows <= MAX_FEW_ROWS
        outputs, columns = w.shape
        form = wide_form((outputs, columns), parts, rows, self.num_sms)
        defines = {
            "KIND": int(kind), "N": outputs, "K": columns, "PARTS": parts, "HALVES": wide_rows(rows) // 32,
            "TILES": form.tiles, "STEP": form.step, "STAGES": form.stages, **self._sizes,
        }  # fmt: skip
        blocks = -(-outputs // (16 * form.tiles)) * parts
        if parts == 1 and kind not in (Kind.QKV, Kind.RESIDUAL):  # others fetch what they add before their only tiles
            blocks = min(blocks, self.num_sms)
        boxes = (
            TensorMap.of(w.data_ptr(), outputs, columns, 16 * form.tiles),
            TensorMap.of(args.x, rows, columns, wide_rows(rows)),
        )
        kernel = self._kernel("wide.cu", "wide", defines)
        kernel.launch(
            (blocks, 1, 1), WIDE_THREADS, WideArgs(*boxes, args), stream=current_stream(), shared=form.shared,
            cluster=parts,
        )  # fmt: skip

    def _is_large(self, w: Matrix, rows: int) -> bool:
        return self.own_large and is_large(w, rows, self.num_sms)

    def _large(self, kind: Kind, w: Matrix, rows: int, args: ctypes.Structure, b: Buffers | None = None) -> None:
        """Products of many rows and what follows; of `b` the rows' norm factors are made first."""
        assert isinstance(w, torch.Tensor)
        outputs, columns = w.shape
        form = large_form(outputs, rows, self.num_sms)
        if b is not None:
            of = filled(RowArgs(), nodes_in=b.nodes, out=b.factors, eps=self.shapes.eps, rows=rows)
            self._rows_kernel("row_factors", 1).launch((-(-rows // 8), 1, 1), 256, of, stream=current_stream())
        defines = {
            "KIND": int(kind), "N": outputs, "K": columns, "PARTS": num_parts(outputs, columns), "BLOCKS": form.blocks,
            "GROUP": LARGE_GROUP, "STAGES": form.stages, **self._sizes,
        }  # fmt: skip
        boxes = TensorMap.of_blocks(w.data_ptr(), outputs, columns), TensorMap.of(args.x, rows, columns, LARGE_ROW_TILE)
        whole = LargeArgs(*boxes, args, None if b is None else b.factors.data_ptr())
        self._kernel("large.cu", "large", defines).launch(
            (2 * form.clusters, 1, 1), LARGE_THREADS, whole, stream=current_stream(), shared=form.shared, cluster=2
        )

    def _linear(self, kind: Kind, w: Matrix, rows: int, args: ctypes.Structure) -> None:
        if isinstance(w, Quantized):
            self._quantized(kind, w, rows, args)
            return
        outputs, columns = w.shape
        parts = 1 if kind is Kind.HEAD else num_parts(outputs, columns)
        if is_wide(w, rows):
            self._wide(kind, w, parts, rows, args)
            return
        form = linear_form((outputs, columns), parts, rows, self.num_sms)
        defines = {
            "KIND": int(kind), "N": outputs, "K": columns, "PARTS": parts, "ROW_TILES": form.row_tiles,
            "TILES": form.tiles, "STAGES": form.stages, **self._sizes,
        }  # fmt: skip
        kernel = self._kernel("linear.cu", "linear", defines)
        warps = form.tiles * parts + (form.row_tiles if kind in (Kind.QKV, Kind.GATE_UP, Kind.HEAD) else 0)
        kernel.launch(form.grid, 32 * warps, args, stream=current_stream(), shared=form.shared)

    def _eighths(self, rows: int) -> tuple[int, int, int]:
        """Blocks of 128 threads, each of which has eight values of the residual stream."""
        return (-(-rows * self.shapes.width // (8 * 128)), 1, 1)

    def _row_by_row(self, name: str, parts: int, rows: int, threads: int, args: ctypes.Structure) -> None:
        """So many threads for each row, in as few blocks as can be."""
        blocks = -(-threads // _MAX_ROW_THREADS)
        per_block = -(-threads // (32 * blocks)) * 32
        self._rows_kernel(name, parts).launch((rows, blocks, 1), per_block, args, stream=current_stream())

    def _plain(
        self, x: torch.Tensor, w: Matrix, b: Buffers, rows: int, busy: torch.Tensor | None
    ) -> tuple[torch.Tensor, int]:
        """The product of few rows, where what follows it is a kernel of its own."""
        y = b.products.view(torch.bfloat16)
        self._linear(Kind.PLAIN, w, rows, filled(LinearArgs(), x=x, w=w, out=y, rows=rows, busy=busy))
        return y, 1

    def _product(self, x: torch.Tensor, w: Matrix, b: Buffers) -> tuple[torch.Tensor, int]:
        assert isinstance(w, torch.Tensor)
        rows, (outputs, columns) = len(x), w.shape
        parts = num_parts(outputs, columns)
        if parts == 1:
            y = b.products.view(torch.bfloat16)[: rows * outputs].view(rows, outputs)
            return torch.mm(x, w.t(), out=y), 1
        y = b.products[: parts * rows * outputs].view(parts, rows, outputs)
        return _by_parts(x, w, parts, out=y), parts

    def _takes_whole_rows(self, rows: int, spans: int) -> bool:
        if self._whole_nbytes(spans) + _WHOLE_OTHER_NBYTES > MAX_BLOCK_NBYTES:
            return False
        if self.whole_rows is not None:
            return self.whole_rows
        return spans <= _MAX_WHOLE_SPANS and rows * self.shapes.kv_heads >= _WHOLE_ROWS_PER_SM * self.num_sms

    def _whole_nbytes(self, spans: int) -> int:
        return _WHOLE_TILES * self._tile_nbytes + spans * SPAN * 4  # the ring and the slots

    def _attention_args(
        self, k: torch.Tensor, v: torch.Tensor, inputs: RowInputs, b: Buffers, window: int
    ) -> ctypes.Structure:
        return filled(
            AttentionArgs(), q=b.q, k_store=k, v_store=v, out=b.attention, table=inputs.table,
            positions=inputs.positions, seq_rows=inputs.seq_rows, prefix_lens=inputs.prefix_lens, tails=inputs.tails,
            ready_lens=inputs.ready_lens, partial=b.partial, arrived=b.arrived, table_width=inputs.table.shape[1],
            tail_width=inputs.tails.shape[1], window=window, scale=self._scale,
        )  # fmt: skip

    def _attention_kernel(
        self, name: str, *, two_buffers: bool = False, cluster: bool = False, whole: bool = False, span: int = SPAN
    ) -> Kernel:
        sizes = {k: v for k, v in self._sizes.items() if k != "WIDTH"}
        forms = {"TWO_BUFFERS": int(two_buffers), "CLUSTER": int(cluster), "WHOLE": int(whole)}
        forms |= {"STAGES": _WHOLE_TILES, "SPAN": span}
        return self._kernel("attention.cu", name, {**sizes, **forms})

    def _rows_kernel(self, name: str, parts: int) -> Kernel:
        return self._kernel("rows.cu", name, {**self._sizes, "MLP": self.shapes.mlp, "PARTS": parts})

    def _kernel(self, source: str, name: str, defines: dict[str, int]) -> Kernel:
        key = (source, name, *sorted(defines.items()))
        if key not in self._kernels:
            self._kernels[key] = self._modules.kernel(source, name, defines)
        return self._kernels[key]
