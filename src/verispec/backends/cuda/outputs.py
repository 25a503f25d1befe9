"""From the logits of a pass, on the device, to what was wanted, while the host waits: what no captured graph gives.

Given log-probabilities, alternatives, distributions when they are looked at, and whatever is wanted beside these: all
computed on the device, with the bits of `verispec.sampling`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from verispec.backends.cuda.device import Device
from verispec.backends.cuda.drawing import DrawInputs
from verispec.backends.protocol import Pass, PassResult, StaleHandleError
from verispec.backends.resident import Resident
from verispec.sampling.draw import DrawResult, NoisyTopK, TopKResult
from verispec.sampling.maths import log_f32
from verispec.sampling.rows import SamplingRows
from verispec.sampling.weights import WEIGHT_BITS, Totals, logprobs

Int32 = NDArray[np.int32]


def noisy_top_k(words: Int32) -> NoisyTopK:
    """From [3, R, k] as the device gives it."""
    values, of_ids = words[1:].view(np.float32)
    return NoisyTopK(words[0].astype(np.int64), values, of_ids)


class _Handle:
    """Distributions of some rows, made from a copy of their logits when they are asked for."""

    def __init__(self, outputs: DeviceOutputs, logits: torch.Tensor, sampling: SamplingRows) -> None:
        self._outputs, self._sampling = outputs, sampling
        self._logits: torch.Tensor | None = logits

    def probabilities(self) -> NDArray[np.float32]:
        """[R, V], on the host."""
        return self._outputs.shares(self._alive(), self._sampling)

    def logprobs(self, rows: NDArray[np.int64], token_ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Of one id at each of these rows, raw."""
        return self._outputs.given(self._alive(), rows, token_ids)

    def release(self) -> None:
        self._logits = None

    def _alive(self) -> torch.Tensor:
        if self._logits is None:
            raise StaleHandleError("the distribution was released")
        return self._logits


class DeviceOutputs:
    """Computes results by the draw's kernels and by plain torch."""

    def __init__(self, device: Device, draws: Any, allowed: torch.Tensor) -> None:
        self._device, self._draws, self._allowed = device.name, draws, allowed

    def collect(self, pass_: Pass, resident: Resident, head_rows: Int32, logits: torch.Tensor) -> PassResult:
        """`logits[i]` are those of row `head_rows[i]` of the pass; `head_rows` is ascending."""
        wanted = pass_.wanted
        draw, given, top_k, noisy, shown = (
            wanted.draw, wanted.logprobs, wanted.top_k, wanted.noisy_top_k, wanted.distribution
        )  # fmt: skip
        result = PassResult()
        if shown is not None:
            rows = logits[self._at(head_rows, shown.rows)].clone()
            result = replace(result, distribution=self.handle(rows, resident.sampling(pass_.rows, shown.rows)))
        if draw is not None:
            sampling = resident.sampling(pass_.rows, draw.rows, draw.noise)
            result = replace(result, draw=self._draw(logits[self._at(head_rows, draw.rows)], sampling))
        if noisy is not None:
            sampling = resident.sampling(pass_.rows, noisy.rows, noisy.noise)
            found = self._children(logits[self._at(head_rows, noisy.rows)], sampling, noisy.k)
            result = replace(result, noisy_top_k=found)
        if given is not None:
            at = np.searchsorted(head_rows, given.rows)
            result = replace(result, logprobs=self.given(logits, at, given.token_ids.astype(np.int64)))
        if top_k is not None:
            total = self._totals(logits)
            at = np.searchsorted(head_rows, top_k.rows)
            chosen = logits[self._sent(at)]
            ids = torch.argsort(0.0 - chosen, dim=-1, stable=True)[:, : top_k.k]  # a zero has one sign here
            values = torch.gather(chosen, 1, ids).cpu().numpy()
            of_ids = logprobs(values, Totals(*(part[at] for part in total)))
            result = replace(result, top_k=TopKResult(ids.cpu().numpy(), of_ids))
        return result

    def handle(self, logits: torch.Tensor, sampling: SamplingRows) -> _Handle:
        """Distributions of rows whose logits nobody else has."""
        return _Handle(self, logits, sampling)

    def _sent(self, values: NDArray[np.generic]) -> torch.Tensor:
        if values.dtype in (np.int32, np.uint32, np.uint64):
            values = values.astype(np.int64)
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)

    def _at(self, head_rows: Int32, rows: Int32) -> torch.Tensor:
        return self._sent(np.searchsorted(head_rows, rows))

    def _draw(self, logits: torch.Tensor, sampling: SamplingRows) -> DrawResult:
        rows, inputs, how = self._how(logits, sampling)
        self._draws.draw(logits, inputs, rows, **how)
        tokens, found = (part[:rows].cpu().numpy() for part in (self._draws.token_ids, self._draws.logprobs))
        return DrawResult(tokens.astype(np.int64), found.copy())

    def _how(self, logits: torch.Tensor, sampling: SamplingRows) -> tuple[int, DrawInputs, dict[str, Any]]:
        """How many rows, their parameters, and what the kernels must look at beside."""
        is_masked = sampling.masks is not None and bool(sampling.masks.any())
        return len(sampling), self._inputs(sampling), {
            "filters": bool(sampling.filters.any()), "edited": self._edited(logits, sampling),
            "allowed": self._allowed if is_masked else None,
        }  # fmt: skip

    def _children(self, logits: torch.Tensor, sampling: SamplingRows, k: int) -> NoisyTopK:
        rows, inputs, how = self._how(logits, sampling)
        return noisy_top_k(self._draws.children(logits, inputs, rows, k=k, **how).cpu().numpy())

    def shares(self, logits: torch.Tensor, sampling: SamplingRows) -> NDArray[np.float32]:
        """As `draw.probabilities` has them. [R, V]"""
        rows, inputs, how = self._how(logits, sampling)
        shares = torch.empty_like(logits)
        self._draws.children(logits, inputs, rows, k=0, **how, shares=shares)
        found: NDArray[np.float32] = shares.cpu().numpy()
        return found

    def given(self, logits: torch.Tensor, rows: NDArray[np.int64], token_ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Raw log-probabilities of one id at each of these rows."""
        total = self._totals(logits)
        values = logits[self._sent(rows), self._sent(token_ids)].cpu().numpy()
        found: NDArray[np.float32] = logprobs(values, Totals(*(part[rows] for part in total)))
        return found

    def _edited(self, logits: torch.Tensor, sampling: SamplingRows) -> torch.Tensor | None:
        """Penalties, bias and bans applied, as `draw.process` does; masks are for the kernels."""
        if not len(sampling.penalty_rows) and not len(sampling.bias_rows):
            return None
        edited = logits.clone()
        at = self._sent(sampling.penalty_rows), self._sent(sampling.penalty_ids)
        value, repetition = edited[at], self._sent(sampling.repetition)
        edited[at] = torch.where(value > 0, value / repetition, value * repetition) - self._sent(sampling.penalty)
        at = self._sent(sampling.bias_rows), self._sent(sampling.bias_ids)
        edited[at] = edited[at] + self._sent(sampling.bias)
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
            masks=None if sampling.masks is None else words(sampling.masks.astype(np.int32)),
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
