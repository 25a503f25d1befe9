"""A CPU in the place of the GPU: the same kernels in plain torch and numpy, so that the CUDA backend runs without one.

What stands between passes is the kernels' own source (`cuda_emulated.py`). Products are summed in float64 and rounded
once, which keeps rows pure; the bits are not those of a GPU. What a pass without rows leaves as it was is poisoned.
"""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import torch

from tests.support import cuda_emulated
from verispec.backends.cuda.drawing import MASS_CHUNK, DrawKernels
from verispec.backends.cuda.quantize import Quantized
from verispec.backends.cuda.shapes import Shapes, gate_up_order, qkv_order
from verispec.backends.cuda.steps import StepKernels
from verispec.sampling import draw
from verispec.sampling.rows import SamplingRows
from verispec.sampling.weights import below_top, totals, weights

torch.set_num_threads(1)  # tensors are tiny: threads would wait for each other


def product(x: torch.Tensor, w: torch.Tensor | Quantized) -> torch.Tensor:
    w = w.dense() if isinstance(w, Quantized) else w
    return (x.double() @ w.double().T).float()


def is_idle(busy: torch.Tensor | None) -> bool:
    return busy is not None and not int(busy)


class StandInKernels:
    num_sms = 132  # those of an H200: forms are named by them

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes
        self._qkv = torch.from_numpy(np.argsort(qkv_order(shapes)))
        self._gate_up = torch.from_numpy(np.argsort(gate_up_order(shapes)))
        self.rows_per_group = 64 // (shapes.heads // shapes.kv_heads)

    def attends_whole(self, num_groups, spans) -> bool:
        return spans == 1

    def rows_form(self, rows, spans) -> str:
        return f"rows of {spans} spans"

    def plain(self, x, w, *, many) -> torch.Tensor:
        return product(x, w).bfloat16()

    def embed(self, table, gain, inputs, b, rows, starts=None) -> None:
        b.not_finite[:rows] = 0
        x = table[inputs.token_ids[:rows].long()].float() * self.shapes.embed_scale
        if starts is not None:
            at = torch.nonzero(starts.ids[:rows] >= 0)[:, 0]
            x[at] = starts.states[starts.ids[at].long()].float()
        self._keep(x.bfloat16(), gain, b, rows)

    def _keep(self, x, gain, b, rows) -> None:
        b.x[:rows] = x
        b.scaled[:rows] = (x.float() * gain).bfloat16()
        b.nodes[:rows] = (x.float() ** 2).reshape(rows, -1, 16).sum(-1)

    def _factor(self, nodes) -> torch.Tensor:
        mean = nodes.double().sum(-1, keepdim=True) / self.shapes.width
        return (1 / torch.sqrt(mean + self.shapes.eps)).float()

    def qkv(self, layer, k, v, inputs, b, rows, *, many, busy=None) -> None:
        if is_idle(busy):
            b.q[:rows] = torch.nan
            return
        shapes = self.shapes
        y = product(b.scaled[:rows], layer.qkv).bfloat16()[:, self._qkv].float() * self._factor(b.nodes[:rows])
        if layer.qkv_bias is not None:
            y = y + layer.qkv_bias
        q, new_k, new_v = y.reshape(rows, -1, shapes.head_dim).split(
            (shapes.heads, shapes.kv_heads, shapes.kv_heads), 1
        )
        if layer.q_gain is not None:
            q, new_k = self._normed(q, layer.q_gain), self._normed(new_k, layer.k_gain)
        at = inputs.positions[:rows].long()
        cos, sin = layer.cos[at][:, None], layer.sin[at][:, None]
        b.q[:rows] = _rotated(q, cos, sin).bfloat16()
        kept = [_rotated(new_k, cos, sin).bfloat16(), new_v.bfloat16()]
        for store, values in zip((k, v), kept, strict=True):
            finite = values.isfinite()
            b.not_finite[:rows] |= (~finite).any(-1).any(-1).int()
            store[inputs.slots[:rows].long()] = torch.where(finite, values, torch.zeros_like(values))

    def _normed(self, v, gain) -> torch.Tensor:
        factor = 1 / torch.sqrt((v.double() ** 2).mean(-1, keepdim=True) + self.shapes.eps)
        return v * factor.float() * gain

    def attend_rows(self, k, v, inputs, b, *, first_row, rows, spans, window, drafts=False) -> None:
        for row in range(first_row, first_row + rows):
            assert int(inputs.positions[row]) < 256 * spans
            self._attend(row, row, k, v, inputs, b, window)

    def attend_groups(self, k, v, inputs, b, groups, *, first_row, rows, spans, window) -> None:
        for first, count in groups.tolist():
            for row in range(first, first + count):
                assert first_row <= row < first_row + rows
                self._attend(row, first + count - 1, k, v, inputs, b, window)

    def _attend(self, row, final_row, k, v, inputs, b, window) -> None:
        """`final_row` names the context's slots."""
        shapes, length, prefix = self.shapes, int(inputs.positions[row]) + 1, int(inputs.prefix_lens[final_row])
        table = inputs.table[int(inputs.seq_rows[final_row]), : min(prefix, length)]
        slots = torch.cat([table, inputs.tails[final_row, : max(0, length - prefix)]]).long()[-window:]
        group = shapes.heads // shapes.kv_heads
        keys, values = (part[slots].double().repeat_interleave(group, 1) for part in (k, v))
        scores = torch.einsum("hd,jhd->hj", b.q[row].double(), keys) * (shapes.query_scalar or shapes.head_dim) ** -0.5
        b.attention[row] = torch.einsum("hj,jhd->hd", scores.softmax(-1), values).bfloat16()

    def residual(self, x, w, gain, b, rows, *, many, post_gain=None, busy=None) -> None:
        if is_idle(busy):
            b.x[:rows] = b.scaled[:rows] = torch.nan
            return
        y = product(x.reshape(len(x), -1)[:rows], w).bfloat16().float()
        if post_gain is not None:
            y = self._normed(y, post_gain)
        self._keep((b.x[:rows].float() + y).bfloat16(), gain, b, rows)

    def gate_up(self, layer, b, rows, *, many, busy=None) -> None:
        if is_idle(busy):
            b.h[:rows] = torch.nan
            return
        y = product(b.scaled[:rows], layer.gate_up).bfloat16()[:, self._gate_up].float() * self._factor(b.nodes[:rows])
        gate, up = y.split(self.shapes.mlp, 1)
        functional, gate = torch.nn.functional, gate.double()
        gate = functional.gelu(gate, approximate="tanh") if self.shapes.gelu else functional.silu(gate)
        b.h[:rows] = (gate.float() * up).bfloat16()

    def head(self, w, b, logits, row_ids, rows, *, many, busy=None) -> None:
        if is_idle(busy):
            logits[:rows] = torch.nan
            return
        at = torch.arange(rows) if row_ids is None else row_ids[:rows].long()
        logits[:rows] = product(b.scaled[at], w) * self._factor(b.nodes[at])


def _rotated(v, cos, sin) -> torch.Tensor:
    first, second = v.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class StandInDraws:
    def __init__(self, rows: int) -> None:
        self.token_ids, self.logprobs = torch.zeros(rows, dtype=torch.int32), torch.zeros(rows)
        self.totals = torch.zeros(rows, 2)

    def draw(self, logits, inputs, rows, *, filters, edited=None, allowed=None, busy=None) -> None:
        if is_idle(busy):
            self.token_ids[:rows], self.logprobs[:rows] = 1 << 30, torch.nan
            return
        sampling = self._sampling(inputs, rows, filters, allowed)
        raw = logits[:rows].numpy()
        with np.errstate(all="ignore"):
            self._sums = weights(np, below_top(np, raw)).sum(axis=-1)
            drawn = draw.draw(np, raw if edited is None else edited[:rows].numpy(), sampling)
            if edited is not None:
                found = draw.logprobs_of(np, raw, np.maximum(drawn.token_ids, 0))
                drawn = drawn._replace(logprobs=np.where(drawn.token_ids < 0, np.nan, found).astype(np.float32))
            self.totals[:rows] = torch.from_numpy(np.stack(totals(np, raw), axis=1))
        self.token_ids[:rows] = torch.from_numpy(drawn.token_ids.astype(np.int32))
        self.logprobs[:rows] = torch.from_numpy(drawn.logprobs)

    def children(
        self, logits, inputs, rows, *, k, filters, edited=None, allowed=None, shares=None, kept=None, busy=None
    ):
        if is_idle(busy):
            return torch.full((3, rows, k), 1 << 30, dtype=torch.int32)
        sampling = self._sampling(inputs, rows, filters, allowed)
        values = (logits if edited is None else edited)[:rows].numpy()
        with np.errstate(all="ignore"):
            found = draw.noisy_top_k(np, values, sampling, k)
            if shares is not None:
                shares[:] = torch.from_numpy(draw.probabilities(np, values, sampling))
            if kept is not None:
                self._keep(kept, draw.probabilities(np, values, sampling))
        floats = [part.astype(np.float32).view(np.int32) for part in found[1:]]
        return torch.from_numpy(np.stack([found.token_ids.astype(np.int32), *floats]))

    def _keep(self, kept, shares) -> None:
        wanted = np.flatnonzero(kept.rows[: len(shares)].numpy() >= 0)
        padded = np.zeros((len(wanted), kept.masses.shape[1], MASS_CHUNK))
        padded.reshape(len(wanted), kept.masses.shape[1] * MASS_CHUNK)[:, : shares.shape[1]] = shares[wanted]
        while padded.shape[2] > 1:
            padded = padded[:, :, ::2] + padded[:, :, 1::2]
        at = kept.rows[wanted].long()
        kept.values[at], kept.masses[at] = torch.from_numpy(shares[wanted]), torch.from_numpy(padded[:, :, 0])

    def _sampling(self, inputs, rows, filters, allowed) -> SamplingRows:
        seeds = inputs.seeds[:rows].numpy().view(np.uint32).astype(np.uint64)
        counters = inputs.counters[:rows].numpy().astype(np.int64)
        none = np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float32)
        sampling = SamplingRows(
            seeds=seeds[:, 0] | seeds[:, 1] << np.uint64(32), t=counters[:, 0], sample_index=counters[:, 1],
            stream=counters[:, 2], temperature=inputs.temperature[:rows].numpy(),
            top_k=inputs.top_k[:rows].numpy().astype(np.int64), top_p=inputs.top_p[:rows].numpy(),
            log_min_p=inputs.log_min_p[:rows].numpy(), penalty_rows=none[0], penalty_ids=none[1], repetition=none[2],
            penalty=none[2], bias_rows=none[0], bias_ids=none[1], bias=none[2],
            masks=None if allowed is None else inputs.masks[:rows].numpy().astype(np.int64),
            allowed=None if allowed is None else allowed.numpy().view(np.uint32),
        )  # fmt: skip
        assert filters or not (sampling.filters & (sampling.temperature > 0)).any()
        return sampling

    def sums(self, rows: int) -> torch.Tensor:
        return torch.from_numpy(self._sums[:rows])


class StandInSteps(StepKernels):
    """The kernels' own sources, with fewer threads."""

    def __init__(self, *, backwards: bool, changes: tuple[tuple[str, str, str], ...]) -> None:
        super().__init__()
        self._backwards, self._changes = backwards, changes

    def launch(self, source, name, args, *, blocks=1, threads=1024) -> None:
        changes = tuple((old, new) for at, old, new in self._changes if at == source)
        cuda_emulated.launch(
            source, name, args, grid=(blocks, 1, 1), threads=threads, fewer=32, backwards=self._backwards,
            changes=changes,
        )  # fmt: skip


class EmulatedDraws(DrawKernels):
    """The draw's own sources."""

    def __init__(self, vocab: int, rows: int, *, backwards: bool = False) -> None:
        super().__init__(vocab, rows, device="cpu")
        self._backwards = backwards

    def launch(self, source, name, grid, threads, args, *, defines) -> None:
        cuda_emulated.launch(
            source, name, args, grid=grid, threads=threads, defines=tuple(defines), backwards=self._backwards
        )


class StandInGraph:
    def __init__(self, work) -> None:
        self.replay = work


class StandInEvent:
    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class StandIn:
    """A device of tests."""

    name = "cpu"
    leaves_out = False
    is_abandoned = False

    def __init__(self, *, backwards: bool = False, changes: tuple[tuple[str, str, str], ...] = ()) -> None:
        """Threads of kernels between passes take turns `backwards`; `changes` are made to a
        source: its name, old and new text."""
        self._steps = StandInSteps(backwards=backwards, changes=changes)

    def kernels(self, shapes) -> StandInKernels:
        return StandInKernels(shapes)

    def draws(self, vocab_size: int, rows: int) -> StandInDraws:
        return StandInDraws(rows)

    def steps(self) -> StandInSteps:
        return self._steps

    def capture(self, work) -> StandInGraph:
        work()
        return StandInGraph(work)

    def only_if(self, busy, work) -> None:
        work()  # what is left out is poisoned

    def host_words(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32)

    def abandon(self) -> None:
        self.is_abandoned = True

    def event(self) -> StandInEvent:
        return StandInEvent()

    def current(self) -> nullcontext[None]:
        return nullcontext()

    def exact_products(self) -> nullcontext[None]:
        return nullcontext()

    def describe(self) -> dict[str, str]:
        return {"gpu": "none"}
