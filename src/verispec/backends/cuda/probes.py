"""What the audit measures on a GPU: the products of a model, its attention and the draw, as a pass would run them."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from verispec.backends.audit import KernelProbe
from verispec.backends.cuda.device import Device
from verispec.backends.cuda.drawing import DrawInputs
from verispec.backends.cuda.forward import DeviceModel, Plan
from verispec.backends.cuda.kernels import ALL_FEW, RowInputs
from verispec.backends.probes import probe_rows
from verispec.backends.protocol import BackendLimits
from verispec.kv import NUM_RESERVED

_MOST_OUTPUTS = 4096  # of a product: the audit compares on the host
_LENGTHS = (1, 63, 65, 255, 257, 520)
Float32 = NDArray[np.float32]


def probes(model: DeviceModel, device: Device, limits: BackendLimits) -> list[KernelProbe]:
    """One per kind of kernel."""
    layer, shapes = model.layers[0], model.shapes
    matrices = {"q/k/v": layer.qkv, "output": layer.o, "gate/up": layer.gate_up, "down": layer.down, "head": model.head}
    found = [KernelProbe(name, w.shape[1], partial(_product, model, device, w)) for name, w in matrices.items()]
    found.append(KernelProbe("attention", shapes.attention, partial(_attention, model, device, limits)))
    found.append(KernelProbe("draw", shapes.vocab, partial(_draw, device)))
    return found


def _sent(values: NDArray[np.generic], device: Device, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device.name).to(dtype)


def _product(model: DeviceModel, device: Device, w: torch.Tensor, x: Float32) -> Float32:
    step = -(-w.shape[0] // _MOST_OUTPUTS)
    with device.current(), device.exact_products():
        forms = model.forms(len(x), len(x))
        many = {id(model.head): forms.head, id(model.layers[0].qkv): forms.qkv, id(model.layers[0].o): forms.o}
        many |= {id(model.layers[0].gate_up): forms.gate_up, id(model.layers[0].down): forms.down}
        y = model.kernels.plain(_sent(x, device, torch.bfloat16), w, many=many[id(w)])
        found: Float32 = y[:, ::step].float().cpu().numpy()
    return found


def _attention(model: DeviceModel, device: Device, limits: BackendLimits, x: Float32) -> Float32:
    """Over random K/V, which overwrites the first layer's; a row's context follows from its content."""
    num_slots = min(limits.num_slots, limits.context_len, max(_LENGTHS))
    table = np.random.default_rng(1).integers(NUM_RESERVED, num_slots + NUM_RESERVED, (3, num_slots)).astype(np.int32)
    rows = probe_rows(x, table, [min(length, num_slots) for length in _LENGTHS])
    tails = np.pad(rows.tails, ((0, 0), (0, 1)))
    names = ("token_ids", "positions", "slots", "seq_rows", "prefix_lens")
    with device.current():
        generator = torch.Generator(device=device.name).manual_seed(1)
        for store in (model.k[0], model.v[0]):
            store[: num_slots + NUM_RESERVED].normal_(generator=generator)
        inputs = RowInputs(
            **{name: _sent(getattr(rows, name), device, torch.int32) for name in names},
            ready_lens=_sent(rows.positions, device, torch.int32), tails=_sent(tails, device, torch.int32),
            table=_sent(table, device, torch.int32),
        )  # fmt: skip
        model.buffers.q[: len(x)] = _sent(x, device, torch.bfloat16).view(len(x), *model.buffers.q.shape[1:])
        model.attend(0, inputs, Plan(len(x), ALL_FEW, len(x), spans=4))
        found: Float32 = model.buffers.attention[: len(x)].float().flatten(1).cpu().numpy()
    return found


def _draw(device: Device, logits: Float32) -> NDArray[np.float64]:
    rows, kernels = len(logits), device.draws(logits.shape[1], len(logits))

    def column(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device=device.name)

    with device.current():
        inputs = DrawInputs(
            seeds=torch.tensor([[7, 0]] * rows, dtype=torch.int32, device=device.name),
            counters=torch.tensor([[5, 0, 0]] * rows, dtype=torch.int32, device=device.name),
            temperature=column(0.8), top_k=column(40, torch.int32), top_p=column(0.95), log_min_p=column(-np.inf),
        )  # fmt: skip
        kernels.draw(_sent(logits, device, torch.float32), inputs, rows, filters=True)
        return np.stack([kernels.token_ids[:rows].cpu().numpy(), kernels.logprobs[:rows].cpu().numpy()], 1)
