"""The known-answer test of the kernels: logits of a tiny model must have the digests an H200 gave, by every form."""

from __future__ import annotations

import json

import numpy as np
import torch
from numpy.typing import NDArray

from verispec.backends.cuda import tiny
from verispec.backends.cuda.device import Device
from verispec.backends.cuda.forward import DeviceModel, Plan
from verispec.backends.cuda.kernels import ALL_FEW, ALL_MANY, RowInputs

# Products of few rows and of many; attention of single rows, and of groups.
_WAYS = (("few rows", ALL_FEW, False), ("many rows", ALL_MANY, False), ("rows in groups", ALL_MANY, True))


def wrong_answers(device: Device, family: str) -> tuple[str, ...]:
    """The cases that fail here, of the tiny model that is most like this family's."""
    name = family if family in tiny.ARCHITECTURES else "llama"
    goldens, source = json.loads(tiny.GOLDENS.read_text())[name], tiny.tiny_model(name)
    wrong = []
    with device.current():
        model = DeviceModel(
            source.shapes, source.positions, source.tensors.__getitem__, num_slots=tiny.NUM_SLOTS, max_rows=64,
            context_len=tiny.CONTEXT_LEN, tied=source.arch.tied_head, device=device,
        )  # fmt: skip
        table = tiny.slot_table()
        given = torch.from_numpy(table[1, : tiny.GIVEN_A]).to(device.name)
        kv = [torch.from_numpy(part).to(device.name, torch.bfloat16) for part in tiny.given_kv(source)]
        for form, forms, grouped in _WAYS:
            model.k[:, given], model.v[:, given] = kv
            for number, rows in enumerate(tiny.passes()):
                count = len(rows.positions)
                plan = Plan(count, forms, count, spans=2)
                if grouped:
                    groups = tiny.groups_of(rows.seq_rows, model.kernels.rows_per_group)
                    plan = plan._replace(single_rows=0, groups=torch.from_numpy(groups).to(device.name))
                with device.exact_products():
                    logits = model.forward(_inputs(rows, table, device.name), plan)
                if tiny.digest(logits.cpu().numpy()) != goldens[f"{number}/logits"]:
                    wrong.append(f"{name}, pass {number}, {form}")
    return tuple(wrong)


def _inputs(rows: tiny.TinyRows, table: NDArray[np.int64], device: str) -> RowInputs:
    def sent(values: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int32)).to(device)

    first = {int(s): int(rows.positions[rows.seq_rows == s].min()) for s in set(rows.seq_rows.tolist())}
    return RowInputs(
        token_ids=sent(rows.token_ids), positions=sent(rows.positions), slots=sent(rows.slots),
        seq_rows=sent(rows.seq_rows), prefix_lens=sent(rows.positions + 1),
        ready_lens=sent(np.array([first[int(s)] for s in rows.seq_rows])),
        tails=sent(np.zeros((len(rows.positions), 1), np.int64)), table=sent(table),
    )  # fmt: skip
