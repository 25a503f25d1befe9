"""A CPU in the place of the GPU: the same kernels in plain torch and numpy, so that the CUDA backend runs without one.

Products are summed in float64 and rounded once, which keeps rows pure; the bits are not those of a GPU.
"""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import torch

from verispec.backends.cuda.shapes import Shapes, gate_up_order, qkv_order
from verispec.backends.cuda.steps import HEADER, RECORD, RECORD_WORDS
from verispec.kv import DUMP_SLOT
from verispec.sampling import draw
from verispec.sampling.rows import SamplingRows
from verispec.sampling.weights import below_top, weights

AT = {name: i for i, name in enumerate(RECORD)}


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x.double() @ w.double().T).float()


class StandInKernels:
    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes
        self._qkv = torch.from_numpy(np.argsort(qkv_order(shapes)))
        self._gate_up = torch.from_numpy(np.argsort(gate_up_order(shapes)))
        self.rows_per_group = 64 // (shapes.heads // shapes.kv_heads)

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

    def qkv(self, layer, k, v, inputs, b, rows, *, many) -> None:
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

    def attend_rows(self, k, v, inputs, b, *, first_row, rows, spans, window) -> None:
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

    def residual(self, x, w, gain, b, rows, *, many, post_gain=None) -> None:
        y = product(x.reshape(len(x), -1)[:rows], w).bfloat16().float()
        if post_gain is not None:
            y = self._normed(y, post_gain)
        self._keep((b.x[:rows].float() + y).bfloat16(), gain, b, rows)

    def gate_up(self, layer, b, rows, *, many) -> None:
        y = product(b.scaled[:rows], layer.gate_up).bfloat16()[:, self._gate_up].float() * self._factor(b.nodes[:rows])
        gate, up = y.split(self.shapes.mlp, 1)
        functional, gate = torch.nn.functional, gate.double()
        gate = functional.gelu(gate, approximate="tanh") if self.shapes.gelu else functional.silu(gate)
        b.h[:rows] = (gate.float() * up).bfloat16()

    def head(self, w, b, logits, row_ids, rows, *, many) -> None:
        at = torch.arange(rows) if row_ids is None else row_ids[:rows].long()
        logits[:rows] = product(b.scaled[at], w) * self._factor(b.nodes[at])


def _rotated(v, cos, sin) -> torch.Tensor:
    first, second = v.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class StandInDraws:
    def __init__(self, rows: int) -> None:
        self.token_ids, self.logprobs = torch.zeros(rows, dtype=torch.int32), torch.zeros(rows)

    def draw(self, logits, inputs, rows, *, filters, edited=None, allowed=None) -> None:
        sampling = self._sampling(inputs, rows, filters, allowed)
        raw = logits[:rows].numpy()
        with np.errstate(all="ignore"):
            self._sums = weights(np, below_top(np, raw)).sum(axis=-1)
            drawn = draw.draw(np, raw if edited is None else edited[:rows].numpy(), sampling)
            if edited is not None:
                found = draw.logprobs_of(np, raw, np.maximum(drawn.token_ids, 0))
                drawn = drawn._replace(logprobs=np.where(drawn.token_ids < 0, np.nan, found).astype(np.float32))
        self.token_ids[:rows] = torch.from_numpy(drawn.token_ids.astype(np.int32))
        self.logprobs[:rows] = torch.from_numpy(drawn.logprobs)

    def children(self, logits, inputs, rows, *, filters, edited, allowed, shares=None):
        """Keys as the kernels make them, from the shared code's scores."""
        sampling = self._sampling(inputs, rows, filters, allowed)
        with np.errstate(all="ignore"):
            processed = draw.process(np, (logits if edited is None else edited)[:rows].numpy(), sampling)
            greedy = (sampling.temperature == 0)[:, None]
            z = np.where(greedy, below_top(np, processed), draw.scaled_logits(np, processed, sampling))
            scores = np.where(greedy, processed, draw.noisy_logits(np, z, sampling)).astype(np.float32)
            if shares is not None:
                values = (logits if edited is None else edited)[:rows].numpy()
                shares[:] = torch.from_numpy(draw.probabilities(np, values, sampling))
        ids = np.arange(z.shape[1], dtype=np.uint64)
        keys = np.where(z > -np.inf, _ordered(scores) << np.uint64(32) | (np.uint64(0xFFFFFFFF) - ids), 0)
        tops = _ordered(processed.max(axis=1, keepdims=True)) << np.uint64(32)
        signed = (keys.astype(np.uint64) ^ np.uint64(1 << 63)).view(np.int64)
        sums = weights(np, z).sum(axis=-1)
        return torch.from_numpy(signed), torch.from_numpy(tops.view(np.int64)), torch.from_numpy(sums)

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


def _ordered(values: np.ndarray) -> np.ndarray:
    """Unsigned numbers in the order of floats."""
    bits = (values + np.float32(0)).view(np.uint32)
    return np.where(bits >> 31, ~bits, bits ^ np.uint32(1 << 31)).astype(np.uint64)


class StandInSteps:
    """steps.cu, one row after the other."""

    def begin(self, state, sizes) -> None:
        sent = state.sent.numpy()
        header = dict(zip(HEADER, sent[: len(HEADER)].tolist(), strict=True))
        records, table, inputs = state.records.numpy(), state.inputs.table.numpy(), state.inputs

        def part(name: str, *shape: int) -> np.ndarray:
            return sent[header[f"{name}_at"] :][: int(np.prod(shape))].reshape(shape)

        if header["round"] == 0:
            for bind in part("binds", header["binds"], RECORD_WORDS + 1):
                records[bind[0]] = bind[1:]
            seq_rows, positions, slots = part("updates", 3, header["updates"])
            table[seq_rows, positions] = slots
        names = ("token_ids", "positions", "slots", "seq_rows", "prefix_lens", "ready_lens")

        def set_row(i: int, *values: int) -> None:
            for name, value in zip(names, values, strict=True):
                getattr(inputs, name)[i] = value
            state.slot_tokens[values[2]] = values[0]

        def set_from_record(i: int, seq_row: int) -> None:
            token, length = int(records[seq_row, AT["next"]]), int(records[seq_row, AT["length"]])
            if token < 0:
                set_row(i, 0, 0, DUMP_SLOT, 0, 1, 0)
            else:
                set_row(i, token, length - 1, int(table[seq_row, length - 1]), seq_row, length, length - 1)

        if sizes.is_round:
            seq_rows, rounds, tokens, positions = part("members", 4, header["members"])
            for i in range(sizes.rows):
                if i < len(seq_rows) and header["round"] == 0 and tokens[i] >= 0:
                    records[seq_rows[i], [AT["next"], AT["length"]]] = tokens[i], positions[i] + 1
                if i < len(seq_rows) and header["round"] <= rounds[i]:
                    set_from_record(i, int(seq_rows[i]))
                else:
                    set_row(i, 0, 0, DUMP_SLOT, 0, 1, 0)
                self._set_draw(state, i, i, int(inputs.seq_rows[i]), -1, 0, 0)
            return
        for i, values in enumerate(part("rows", 6, sizes.rows).T.tolist()):
            if values[0] < 0:
                set_from_record(i, values[3])
            else:
                set_row(i, *values)
        width = header["tail_width"]
        inputs.tails[: sizes.rows, :width] = torch.from_numpy(part("tails", sizes.rows, width))
        state.groups[:] = 0
        assert header["groups"] <= max(1, sizes.num_groups)
        state.groups[: header["groups"]] = torch.from_numpy(part("groups", header["groups"], 2))
        draws = part("draws", 4, header["draws"])
        assert draws.shape[1] <= sizes.head_rows
        for i in range(sizes.head_rows):
            row, *rest = draws[:, i].tolist() if i < draws.shape[1] else (0, 0, 0, 0)
            self._set_draw(state, i, row, int(inputs.seq_rows[row]) if i < draws.shape[1] else 0, *rest)

    def _set_draw(self, state, i: int, row: int, seq_row: int, t: int, stream: int, mask: int) -> None:
        record, draws = state.records[seq_row], state.draws
        state.row_ids[i], draws.masks[i] = row, mask
        draws.seeds[i] = record[:2]
        t = int(state.inputs.positions[row]) + 1 if t < 0 else t
        draws.counters[i] = torch.tensor([t, int(record[AT["sample"]]), stream])
        draws.top_k[i] = record[AT["top_k"]]
        for name in ("temperature", "top_p", "log_min_p"):
            getattr(draws, name)[i] = record[AT[name]].reshape(1).view(torch.float32)[0]

    def end(self, state, sizes, drawn, logprobs, not_finite) -> None:
        sent, records, inputs = state.sent.numpy(), state.records.numpy(), state.inputs
        header = dict(zip(HEADER, sent[: len(HEADER)].tolist(), strict=True))
        records[inputs.seq_rows[: sizes.rows].numpy()[not_finite[: sizes.rows].numpy() != 0], AT["broken"]] = 1
        width = header["out_width"]
        out = state.out.numpy()[header["round"] * 2 * width :][: 2 * width].reshape(2, width)

        def remember(row: int, token: int) -> None:
            record, length = records[int(inputs.seq_rows[row])], int(inputs.positions[row]) + 2
            stops = record[len(RECORD) :][: record[AT["num_stops"]]]
            goes_on = token >= 0 and length < record[AT["limit"]] and token not in stops
            record[[AT["next"], AT["length"]]] = token if goes_on else -1, length

        for i in range(header["members"] if sizes.is_round else header["draws"]):
            row = int(state.row_ids[i])
            is_padding = int(inputs.slots[row]) == DUMP_SLOT
            broken = records[int(inputs.seq_rows[row]), AT["broken"]]
            out[0, i] = -1 if is_padding or broken else drawn[i]
            out[1, i] = 0 if is_padding else logprobs[i : i + 1].view(torch.int32)[0]
            if sizes.is_round and not is_padding:
                remember(row, int(out[0, i]))
        if not sizes.is_round:
            for at in sent[header["fed_at"] :][: header["fed"]].tolist():
                row = int(state.row_ids[at])
                if int(inputs.slots[row]) != DUMP_SLOT:
                    remember(row, int(out[0, at]))
        sent[0] = header["round"] + 1


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

    def kernels(self, shapes) -> StandInKernels:
        return StandInKernels(shapes)

    def draws(self, vocab_size: int, rows: int) -> StandInDraws:
        return StandInDraws(rows)

    def steps(self) -> StandInSteps:
        return StandInSteps()

    def capture(self, work) -> StandInGraph:
        work()
        return StandInGraph(work)

    def host_words(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32)

    def event(self) -> StandInEvent:
        return StandInEvent()

    def current(self) -> nullcontext[None]:
        return nullcontext()

    def exact_products(self) -> nullcontext[None]:
        return nullcontext()

    def describe(self) -> dict[str, str]:
        return {"gpu": "none"}
