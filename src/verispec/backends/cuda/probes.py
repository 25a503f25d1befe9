"""What the audit measures on a GPU: the products of a model, its attention and the draw, as a pass would run them.

Which implementation that is depends on the number of rows. Shapes of one class have the same bits, so the audit
compares the implementations with each other, too.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from verispec.backends.audit import KernelProbe
from verispec.backends.cuda.arrange import MAX_HEAD_ROWS, MIN_RUN, spans_of
from verispec.backends.cuda.device import Device
from verispec.backends.cuda.drawing import DrawInputs
from verispec.backends.cuda.forward import DeviceModel, Plan
from verispec.backends.cuda.kernels import ALL_FEW, RowInputs
from verispec.backends.cuda.product_forms import product_form
from verispec.backends.cuda.tiny import groups_of
from verispec.backends.probes import probe_rows
from verispec.backends.protocol import BackendLimits, Rows
from verispec.kv import NUM_RESERVED

_MOST_OUTPUTS = 4096  # of a product: the audit compares on the host
_LENGTHS = (1, 63, 65, 255, 257, 520)
_PRODUCTS = {"q/k/v": "qkv", "output": "o", "gate/up": "gate_up", "down": "down"}  # fields of Forms
Float32 = NDArray[np.float32]


def probes(model: DeviceModel, device: Device, limits: BackendLimits) -> list[KernelProbe]:
    """One per kind of kernel; attention of rows one by one, and as prompts have them."""
    layer, shapes = model.layers[0], model.shapes
    found = []
    for name, field in _PRODUCTS.items():
        w = getattr(layer, field)
        form = partial(_product_form, model, field, w)
        found.append(KernelProbe(name, w.shape[1], partial(_product, model, device, field, w), form))
    found.append(KernelProbe("head", shapes.width, partial(_logits, model, device), partial(_head_form, model)))
    for name, in_groups in (("attention", False), ("prompt attention", True)):
        attention = _Attention(model, device, limits, in_groups=in_groups)
        found.append(KernelProbe(name, shapes.attention, attention.run, attention.form))
    found.append(KernelProbe("draw", shapes.vocab, partial(_draw, device)))
    return found


def _sent(values: NDArray[np.generic], device: Device, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device.name).to(dtype)


def _is_many(model: DeviceModel, field: str, rows: int) -> bool:
    return bool(getattr(model.forms(rows, rows), field))


def _product_form(model: DeviceModel, field: str, w: torch.Tensor, rows: int) -> str:
    return product_form(w, rows, many=_is_many(model, field, rows), num_sms=model.kernels.num_sms)


def _product(model: DeviceModel, device: Device, field: str, w: torch.Tensor, x: Float32) -> Float32:
    step = -(-w.shape[0] // _MOST_OUTPUTS)
    with device.current(), device.exact_products():
        y = model.kernels.plain(_sent(x, device, torch.bfloat16), w, many=_is_many(model, field, len(x)))
        found: Float32 = y[:, ::step].float().cpu().numpy()
    return found


def _head_form(model: DeviceModel, rows: int) -> str:
    return _product_form(model, "head", model.head, min(rows, MAX_HEAD_ROWS))


def _logits(model: DeviceModel, device: Device, x: Float32) -> Float32:
    """Of rows whose norm is the same, in as many calls as a pass has rows with logits."""
    b, step, found = model.buffers, -(-len(model.head) // _MOST_OUTPUTS), []
    with device.current(), device.exact_products():
        for part in np.split(x, range(MAX_HEAD_ROWS, len(x), MAX_HEAD_ROWS)):
            rows = len(part)
            b.scaled[:rows], b.nodes[:rows] = _sent(part, device, torch.bfloat16), 1.0
            model.kernels.head(model.head, b, model.logits, None, rows, many=_is_many(model, "head", rows))
            found.append(model.logits[:rows, ::step].clone().cpu().numpy())
    return np.concatenate(found)


class _Attention:
    """Rows over random K/V, which overwrites the first layer's; a row's context follows from its content.

    With `in_groups` no context has a tail, and rows are attended to in groups where a pass would do that to a prompt of
    so many.
    """

    def __init__(self, model: DeviceModel, device: Device, limits: BackendLimits, *, in_groups: bool) -> None:
        self._model, self._device, self._in_groups = model, device, in_groups
        self._num_slots = min(limits.num_slots, limits.context_len, max(_LENGTHS))
        self._lengths = [min(length, self._num_slots) for length in _LENGTHS]
        self._spans = spans_of(max(self._lengths))

    def form(self, num_rows: int) -> str:
        """Which of the kernels serves."""
        kernels = self._model.kernels
        if not self._has_groups(num_rows):
            return str(kernels.rows_form(num_rows, self._spans))
        is_whole = kernels.attends_whole(self._num_groups(num_rows), self._spans)
        return f"a block for each {'group' if is_whole else 'span of a group'}"

    def run(self, x: Float32) -> Float32:
        """What these queries find. [M, heads * d]"""
        ends = NUM_RESERVED, self._num_slots + NUM_RESERVED
        table = np.random.default_rng(1).integers(*ends, (3, self._num_slots)).astype(np.int32)
        rows, order = probe_rows(x, table, self._lengths), np.arange(len(x))
        plan = Plan(len(x), ALL_FEW, len(x), self._spans)
        if self._in_groups:
            rows = replace(rows, prefix_lens=rows.positions + 1, tails=rows.tails[:, :0])
            order = np.lexsort((rows.positions, rows.seq_rows))
        if self._has_groups(len(x)):
            groups = np.zeros((self._num_groups(len(x)), 2), np.int32)  # those that are left have no rows
            found = groups_of(rows.seq_rows[order], self._model.kernels.rows_per_group)
            groups[: len(found)] = found
            plan = plan._replace(single_rows=0, groups=_sent(groups, self._device, torch.int32))
        attended = np.empty_like(x)
        attended[order] = self._attended(x[order], rows, order, table, plan)
        return attended

    def _has_groups(self, num_rows: int) -> bool:
        return self._in_groups and num_rows >= MIN_RUN

    def _num_groups(self, num_rows: int) -> int:
        """At most: rows are of two sequences."""
        return -(-num_rows // self._model.kernels.rows_per_group) + 1

    def _attended(
        self, q: Float32, rows: Rows, order: NDArray[np.int64], table: NDArray[np.int32], plan: Plan
    ) -> Float32:
        model, device = self._model, self._device
        names = ("token_ids", "positions", "slots", "seq_rows", "prefix_lens")
        with device.current():
            generator = torch.Generator(device=device.name).manual_seed(1)
            for store in (model.k[0], model.v[0]):
                store[: self._num_slots + NUM_RESERVED].normal_(generator=generator)
            inputs = RowInputs(
                **{name: _sent(getattr(rows, name)[order], device, torch.int32) for name in names},
                ready_lens=_sent(rows.positions[order], device, torch.int32),
                tails=_sent(np.pad(rows.tails[order], ((0, 0), (0, 1))), device, torch.int32),
                table=_sent(table, device, torch.int32),
            )  # fmt: skip
            model.buffers.q[: len(q)] = _sent(q, device, torch.bfloat16).view(len(q), *model.buffers.q.shape[1:])
            model.attend(0, inputs, plan)
            found: Float32 = model.buffers.attention[: len(q)].float().flatten(1).cpu().numpy()
        return found


def _draw(device: Device, logits: Float32) -> NDArray[np.float64]:
    rows = len(logits)

    def column(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device=device.name)

    with device.current():
        kernels = device.draws(logits.shape[1], rows)
        inputs = DrawInputs(
            seeds=torch.tensor([[7, 0]] * rows, dtype=torch.int32, device=device.name),
            counters=torch.tensor([[5, 0, 0]] * rows, dtype=torch.int32, device=device.name),
            temperature=column(0.8), top_k=column(40, torch.int32), top_p=column(0.95), log_min_p=column(-np.inf),
        )  # fmt: skip
        kernels.draw(_sent(logits, device, torch.float32), inputs, rows, filters=True)
        return np.stack([kernels.token_ids[:rows].cpu().numpy(), kernels.logprobs[:rows].cpu().numpy()], 1)
