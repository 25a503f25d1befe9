"""From the logits of a pass, on the device, to what was wanted, while the host waits: what no captured graph gives.

Draws with penalties, bias and masks, given log-probabilities and alternatives are computed on the device, with the
bits of `verispec.sampling`; distributions and children of draft nodes by that code itself, from downloaded rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from verispec.backends.cuda.device import Device
from verispec.backends.cuda.drawing import DrawInputs
from verispec.backends.outputs import HostLogits, collect
from verispec.backends.protocol import Pass, PassResult
from verispec.backends.resident import Resident
from verispec.sampling.draw import DrawResult, TopKResult
from verispec.sampling.maths import log_f32
from verispec.sampling.rows import SamplingRows
from verispec.sampling.weights import WEIGHT_BITS, Totals, logprobs

Int32 = NDArray[np.int32]


class DeviceOutputs:
    """Computes results by the draw's kernels and by plain torch."""

    def __init__(self, device: Device, draws: Any) -> None:
        self._device, self._draws = device.name, draws

    def collect(self, pass_: Pass, resident: Resident, head_rows: Int32, logits: torch.Tensor) -> PassResult:
        """`logits[i]` are those of row `head_rows[i]` of the pass; `head_rows` is ascending."""
        wanted = pass_.wanted
        draw, given, top_k = wanted.draw, wanted.logprobs, wanted.top_k
        rest = replace(wanted, draw=None, logprobs=None, top_k=None)
        rows = rest.head_rows()
        result = PassResult()
        if len(rows):
            here = logits[self._at(head_rows, rows)].cpu().numpy()
            result = collect(replace(pass_, wanted=rest), resident, rows, HostLogits(here))
        if draw is not None:
            sampling = resident.sampling(pass_.rows, draw.rows, draw.noise)
            result = replace(result, draw=self._draw(logits[self._at(head_rows, draw.rows)], sampling))
        if given is not None or top_k is not None:
            total = self._totals(logits)
        if given is not None:
            at = np.searchsorted(head_rows, given.rows)
            values = logits[self._sent(at), self._sent(given.token_ids)].cpu().numpy()
            result = replace(result, logprobs=logprobs(values, Totals(*(part[at] for part in total))))
        if top_k is not None:
            at = np.searchsorted(head_rows, top_k.rows)
            chosen = logits[self._sent(at)]
            ids = torch.argsort(0.0 - chosen, dim=-1, stable=True)[:, : top_k.k]  # a zero has one sign here
            values = torch.gather(chosen, 1, ids).cpu().numpy()
            found = logprobs(values, Totals(*(part[at] for part in total)))
            result = replace(result, top_k=TopKResult(ids.cpu().numpy(), found))
        return result

    def _sent(self, values: NDArray[np.generic]) -> torch.Tensor:
        if values.dtype in (np.int32, np.uint32, np.uint64):
            values = values.astype(np.int64)
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)

    def _at(self, head_rows: Int32, rows: Int32) -> torch.Tensor:
        return self._sent(np.searchsorted(head_rows, rows))

    def _draw(self, logits: torch.Tensor, sampling: SamplingRows) -> DrawResult:
        edited, rows = self._edited(logits, sampling), len(sampling)
        self._draws.draw(logits, self._inputs(sampling), rows, filters=bool(sampling.filters.any()), edited=edited)
        tokens, found = (part[:rows].cpu().numpy() for part in (self._draws.token_ids, self._draws.logprobs))
        return DrawResult(tokens.astype(np.int64), found.copy())

    def _edited(self, logits: torch.Tensor, sampling: SamplingRows) -> torch.Tensor | None:
        """Penalties, bias, bans and masks applied, as `draw.process` does."""
        masked = np.flatnonzero(() if sampling.masks is None else sampling.masks)
        if not len(sampling.penalty_rows) and not len(sampling.bias_rows) and not len(masked):
            return None
        edited = logits.clone()
        at = self._sent(sampling.penalty_rows), self._sent(sampling.penalty_ids)
        value, repetition = edited[at], self._sent(sampling.repetition)
        edited[at] = torch.where(value > 0, value / repetition, value * repetition) - self._sent(sampling.penalty)
        at = self._sent(sampling.bias_rows), self._sent(sampling.bias_ids)
        edited[at] = edited[at] + self._sent(sampling.bias)
        if len(masked):
            assert sampling.masks is not None
            assert sampling.allowed is not None
            part = edited[self._sent(masked)]
            packed = self._sent(sampling.allowed[sampling.masks[masked]].view(np.uint8)).int()  # [masked, V / 8]
            bits = (packed[:, :, None] >> torch.arange(8, device=self._device)) & 1
            banned = torch.where(part < torch.inf, -torch.inf, torch.nan)  # a mask makes no row usable
            edited[self._sent(masked)] = torch.where(bits.flatten(1)[:, : part.shape[1]] > 0, part, banned)
        return edited

    def _inputs(self, sampling: SamplingRows) -> DrawInputs:
        counters = np.stack([sampling.t, sampling.sample_index, sampling.stream], axis=1).astype(np.uint32)
        seeds = np.ascontiguousarray(sampling.seeds).view(np.int32).reshape(-1, 2)

        def words(values: NDArray[np.generic]) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)

        return DrawInputs(
            seeds=words(seeds), counters=words(counters.view(np.int32)), temperature=words(sampling.temperature),
            top_k=words(sampling.top_k.astype(np.int32)), top_p=words(sampling.top_p),
            log_min_p=words(sampling.log_min_p),
        )  # fmt: skip

    def _totals(self, logits: torch.Tensor) -> Totals:
        """Of every row of logits, on the host."""
        rows = len(logits)
        words = torch.zeros(rows, 3, dtype=torch.int32, device=self._device)
        zeros = torch.zeros(rows, device=self._device)
        inputs = DrawInputs(words[:, :2].contiguous(), words, zeros, words[:, 0].contiguous(), zeros + 1, zeros)
        self._draws.draw(logits, inputs, rows, filters=False)
        sums = self._draws.sums(rows).cpu().numpy()
        top = (logits.max(dim=-1).values + 0.0).cpu().numpy()
        usable = np.isfinite(top) & (sums > 0)
        found = log_f32(np, np.where(usable, sums, 1).astype(np.float32) * np.float32(2.0**-WEIGHT_BITS))
        return Totals(np.where(usable, top, np.float32(np.nan)), np.where(usable, found, np.float32(np.nan)))
