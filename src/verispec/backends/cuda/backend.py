"""The CUDA backend: passes as replays of captured graphs, with the sequences' state on the device.

A pass that only draws is one copy to the device, a graph per round (and per token drafted in it) and one copy back,
none of which the host waits for; rounds behind the first need no host at all. A level of a draft tree, whose rows offer
children, is the same with a single round. For what few requests want (log-probabilities of given tokens, alternatives)
the host waits, round by round.
Every row has the bits of `docs/cuda-arithmetic.md`, whatever else is in its pass: the family is every number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from verispec.backends.audit import KernelProbe, Progress, no_progress
from verispec.backends.checks import check_pass
from verispec.backends.cuda import answers
from verispec.backends.cuda.arrange import (
    MAX_HEAD_ROWS,
    MAX_PLACES,
    MAX_ROWS,
    ROW_SIZES,
    Arranged,
    arrange,
    at_least,
    spans_of,
)
from verispec.backends.cuda.chains import Chains
from verispec.backends.cuda.device import Device
from verispec.backends.cuda.flights import CudaTicket, Expected, Lane
from verispec.backends.cuda.forward import DeviceModel, Reader
from verispec.backends.cuda.graphs import Draw, GraphKey, Graphs
from verispec.backends.cuda.outputs import DeviceOutputs
from verispec.backends.cuda.probes import probes
from verispec.backends.cuda.shapes import Shapes, positions_of
from verispec.backends.cuda.steps import (
    LENGTH,
    MAX_BIAS,
    MAX_EDITED_ROWS,
    MAX_ROUNDS,
    MAX_STOPS,
    MAX_UPDATES,
    NEXT,
    Parcel,
    Stage,
    StepSizes,
    StepState,
    record_of,
)
from verispec.backends.gpu import Health
from verispec.backends.native_backend import fingerprint
from verispec.backends.options import NUM_MASKS, SECOND_MODEL_WEIGHTS, CudaOptions
from verispec.backends.protocol import (
    FROM_STATE,
    NO_UPDATE,
    BackendLimits,
    Burst,
    DistributionHandle,
    DrawWanted,
    HiddenShape,
    HiddenStart,
    NoisyTopKWanted,
    Pass,
    PassResult,
    ReadyTicket,
    Rows,
    TableUpdate,
    Ticket,
    Wanted,
)
from verispec.backends.resident import Resident
from verispec.backends.rounds import run_rounds
from verispec.errors import InputError
from verispec.kv import DUMP_SLOT, NUM_RESERVED, TARGET_STORE
from verispec.model.architecture import Architecture
from verispec.sampling.draw import NO_TOKEN
from verispec.sampling.rows import Sampler

# Results of spans that are merged: of 2048 rows with contexts of 4096, as bytes of an 8B model; of a larger one fewer.
_SPANS_NBYTES, _MOST_ROW_SPANS = 33 << 24, 33 << 10
_MAX_DRAFT_ROWS = 8  # with more, weights of bf16 are as quick
JUDGES_BY_PROBABILITY = True  # False: the host drafts and judges for rules `rejection` and `recursive`
Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class CudaModel:
    """What the backend needs of a checkpoint. Tensors may be the host's or the device's; KeyError for absent ones."""

    architecture: Architecture
    read: Reader


class CudaBackend:
    """One slot table and one record per sequence, and per model the weights and a K/V store under the same slot ids."""

    shapes = ROW_SIZES
    arithmetics = CudaOptions.SERVES["arithmetic"]
    weights_version = 0

    def __init__(
        self, models: Sequence[CudaModel], *, device: Device, num_slots: int, num_seq_rows: int,
        context_len: int | None = None, max_tail: int = 64, progress: Progress = no_progress, draft_weights: str = "",
        second_weights: str = SECOND_MODEL_WEIGHTS,
    ) -> None:  # fmt: skip
        arch = models[0].architecture
        context_len = min(context_len or arch.context_len, arch.context_len)
        if any(m.architecture.vocab_size != arch.vocab_size for m in models):
            raise InputError("models that share a backend must share their vocabulary")
        if num_seq_rows > MAX_HEAD_ROWS:
            raise InputError(f"the CUDA backend runs up to {MAX_HEAD_ROWS} sequences at once, not {num_seq_rows}")
        self.limits = BackendLimits(
            arch.vocab_size, context_len, num_slots, num_seq_rows, max_tail, len(models), num_masks=NUM_MASKS,
            hidden=tuple(HiddenShape(m.architecture.num_layers, m.architecture.hidden_size) for m in models),
            prepares=True, fast_weights=draft_weights, trees=True, looks_up=True,
            by_probability=JUDGES_BY_PROBABILITY,
        )  # fmt: skip
        self._device = device
        self._architectures = [m.architecture for m in models]
        with device.current():
            self._models = [
                _loaded(m, device, self.limits, partial(_report, progress, i, len(models)), kind)
                for i, (m, kind) in enumerate(zip(models, _kinds(models, draft_weights, second_weights), strict=True))
            ]
            self.limits = replace(self.limits, leaves_out=device.leaves_out)  # a kernel is linked: behind the first one
            self._max_row_spans = min(_row_spans(Shapes.of(arch)) for arch in self._architectures)
            self._state = StepState(self.limits, MAX_PLACES, device.name)
            self._graphs = Graphs(device, self._models, self._state, MAX_ROWS)
        self.resident = Resident(self.limits)
        self._outputs = DeviceOutputs(device, self._graphs.draws, self._state.allowed)
        count = num_seq_rows + 1
        self._filters = np.zeros(count, np.bool_)
        self._by_hand = np.zeros(count, np.bool_)  # sampled on the host
        self._reach = np.zeros(count, np.int32)  # how far the table's row was written
        self._binds: dict[int, Int32] = {}  # not yet sent
        self._new_masks: list[tuple[int, Int32]] = []  # not yet sent: the first row of the table, and words
        self._lanes: list[Lane] = []
        self._left_lanes: list[Lane] = []  # of passes that failed, which the device may still read
        self._health = Health(device.abandon)

    def bind(self, seq_row: int, sampler: Sampler) -> None:
        """A sequence takes this row of the table. It is sent with the next pass."""
        resident, params = self.resident, sampler.params
        resident.bind(seq_row, sampler)
        self._binds[seq_row] = record_of(sampler, self.limits)
        self._filters[seq_row] = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        self._by_hand[seq_row] = len(sampler.stop_ids) > MAX_STOPS or len(params.logit_bias) > MAX_BIAS
        self._reach[seq_row] = 0

    def set_masks(self, first: int, allowed: NDArray[np.uint32]) -> None:
        """Masks `first`.. are these from now on. They are sent before the next pass."""
        self.resident.set_masks(first, allowed)
        self._new_masks.append((first, np.array(allowed).view(np.int32)))

    def submit(self, pass_: Pass) -> Ticket:
        """Start the pass; what the host must take part in is done before this returns."""
        check_pass(pass_, self.limits)
        with self._health.guarded(), self._device.current():
            lane = self._free_lane()
            try:
                ticket = self._started(pass_, lane)
                return ReadyTicket(self._sampled_by_hand(pass_, lane)) if ticket is None else ticket
            except RuntimeError:
                if lane not in self._lanes:
                    self._left_lanes.append(lane)
                raise

    def _free_lane(self) -> Lane:
        if self._lanes:
            return self._lanes.pop()
        if self._left_lanes:
            self._left_lanes[-1].settle()
            return self._left_lanes.pop()
        return Lane(self._device, self._state)

    # Passes that only draw.

    def _started(self, pass_: Pass, lane: Lane) -> Ticket | None:
        """The pass under way; None if the host must sample it."""
        draw, burst = self._draw_on_device(pass_), pass_.burst
        if draw is None:
            return None
        num_rounds = burst.num_rounds if burst is not None else 0
        chains = Chains.of(burst) if burst is not None and burst.drafts else None
        spans = spans_of(self._longest(pass_, num_rounds if chains is None else chains.reach))
        parcel, once, again = Parcel(lane.sent), list[GraphKey](), list[GraphKey]()
        masked = _is_masked(pass_)
        is_cohort = (
            burst is not None and not masked and (_is_cohort(pass_) if chains is None else chains.are_all(pass_))
        )
        width = extra_at = 0
        if not is_cohort:
            arranged = arrange(pass_.rows, len(_drawn(pass_)), self._models[pass_.store].kernels.rows_per_group)
            key = self._key(pass_, arranged, spans, draw)._replace(masked=masked)
            if chains is not None:
                key = key._replace(stage=Stage.FIRST, looks_up=chains.looks_up, weighed=chains.weighed)
            once.append(key._replace(children=_num_children(pass_)))
            self._put_rows(parcel, arranged, pass_, _drawn(pass_))
            width = arranged.head
        if chains is not None:
            drafting = [
                key._replace(drafts=self._drafts(key.store, key.sizes.rows, only_drafts=key.drafts))
                for key in chains.drafting(spans, draw)
            ]
            once, again = drafting * len(once) + once, [*drafting, chains.verifying(pass_, spans, draw)]
            extra_at = max(width, len(chains.owners))
            width = chains.put(parcel, pass_.rows, _drawn(pass_), extra_at)
        elif burst is not None:
            if is_cohort or num_rounds:
                size = at_least(ROW_SIZES, len(burst.rows))
                sizes = StepSizes(size, size, is_round=True)
                drafts = self._drafts(pass_.store, size, only_drafts=pass_.only_drafts)
                again = [GraphKey(pass_.store, pass_.view, sizes, size, spans, draw, drafts=drafts)]
                width = max(width, size)
            self._put_burst(parcel, pass_, burst, is_cohort=is_cohort)
        if self.resident.has_edits[pass_.rows.seq_rows[_drawn(pass_)]].any():
            once, again = ([key._replace(edited=True) for key in keys] for keys in (once, again))
        if not all(self._fits(key) for key in (*once, *again)):
            return None
        first = [self._graphs.get(key) for key in once]
        num_again = num_rounds + is_cohort  # rounds whose rows the device names
        further = [self._graphs.get(key) for key in again] if num_again else []
        parcel.set("out_width", width)
        self._send(parcel, lane, pass_.table_update)
        for graph in first:
            graph.replay()
        shown = self._shown(pass_)
        for graph in further * num_again:
            graph.replay()
        num_drawn = len(_drawn(pass_)) if _asked(pass_) is not None else None
        num_fed = None if burst is None else len(burst.rows)
        expected = Expected(num_rounds + 1, width, num_drawn, num_fed, chains, extra_at, _num_children(pass_), shown)
        lane.fetch(self._state.out, math.prod(expected.shape))
        return CudaTicket(lane, self._lanes, expected, self._health)

    def _fits(self, key: GraphKey) -> bool:
        """Whether there is room for it, above all for what spans leave to merge."""
        sizes = key.sizes
        is_whole = self._models[key.store].kernels.attends_whole(sizes.num_groups, key.spans)
        merged = key.single if is_whole else sizes.rows
        return merged * key.spans <= self._max_row_spans and not (key.edited and sizes.head_rows > MAX_EDITED_ROWS)

    def _draw_on_device(self, pass_: Pass) -> Draw | None:
        """How the rows draw; None where the host must do it."""
        rows, burst = pass_.rows, pass_.burst
        if not self._gives(pass_) or pass_.start is not None or len(rows) > MAX_ROWS:
            return None
        seq_rows = rows.seq_rows[_drawn(pass_)]
        if len(seq_rows) > MAX_HEAD_ROWS:
            return None
        if self._by_hand[seq_rows].any() or (burst is not None and burst.num_rounds > MAX_ROUNDS):
            return None
        if burst is not None and burst.drafts and not Chains.of(burst).fit(pass_, self.limits.vocab_size):
            return None
        return Draw.NONE if not len(seq_rows) else Draw.FILTERED if self._filters[seq_rows].any() else Draw.PLAIN

    def _gives(self, pass_: Pass) -> bool:
        """Whether captured graphs give what is wanted: draws or children, and distributions of such rows."""
        wanted, drawn = pass_.wanted, _drawn(pass_)
        draw, noisy, shown = wanted.draw, wanted.noisy_top_k, wanted.distribution
        if wanted != Wanted(draw=draw, noisy_top_k=noisy, distribution=shown):
            return False
        if noisy is None and shown is None:
            return True
        if noisy is not None and (draw is not None or pass_.burst is not None):
            return False
        if noisy is not None and 3 * len(drawn) * noisy.k > len(self._state.out):
            return False
        has_edits = self.resident.has_edits[pass_.rows.seq_rows]
        return shown is None or bool(
            (drawn[1:] > drawn[:-1]).all() and np.isin(shown.rows, drawn).all() and not has_edits[shown.rows].any()
        )

    def _shown(self, pass_: Pass) -> DistributionHandle | None:
        """Distributions from the logits that the pass's own graph leaves: NaN where a row's context was not finite."""
        shown = pass_.wanted.distribution
        if shown is None:
            return None
        at = torch.from_numpy(np.searchsorted(_drawn(pass_), shown.rows)).to(self._device.name, non_blocking=True)
        logits = self._models[pass_.store].logits[at]
        logits.masked_fill_(self._state.broken_rows[at, None] != 0, np.nan)
        return self._outputs.handle(logits, self.resident.sampling(pass_.rows, shown.rows))

    def _put_burst(self, parcel: Parcel, pass_: Pass, burst: Burst, *, is_cohort: bool) -> None:
        """Who goes on: from where the pass's rows are, or from what they draw."""
        rows, none = pass_.rows, burst.rows * 0
        tokens, positions = (rows.token_ids[burst.rows], rows.positions[burst.rows]) if is_cohort else (none - 1, none)
        parcel.put("members", rows.seq_rows[burst.rows], burst.rounds, tokens, positions)
        parcel.set("members", len(burst.rows))
        if not is_cohort:
            parcel.put("fed", np.searchsorted(_drawn(pass_), burst.rows))
            parcel.set("fed", len(burst.rows))

    def _longest(self, pass_: Pass, num_rounds: int) -> int:
        """The most context any row of the pass or of its rounds can have."""
        update, rows = pass_.table_update, pass_.rows
        if len(update.seq_rows):
            np.maximum.at(self._reach, update.seq_rows, update.positions + 1)
        longest = int(rows.positions.max()) + 1 + num_rounds
        unnamed = rows.token_ids == FROM_STATE
        if unnamed.any():
            longest = max(longest, int(self._reach[rows.seq_rows[unnamed]].max()))
        return min(longest, self.limits.context_len)

    def _key(self, pass_: Pass, arranged: Arranged, spans: int, draw: Draw) -> GraphKey:
        sizes = StepSizes(arranged.columns.shape[1], arranged.head, arranged.num_groups)
        layers = () if pass_.wanted.hidden is None else tuple(sorted(set(pass_.wanted.hidden.layers)))
        starts = pass_.start is not None
        return GraphKey(
            pass_.store, pass_.view, sizes, arranged.single, spans, draw, starts=starts, hidden=layers,
            drafts=self._drafts(pass_.store, sizes.rows, only_drafts=pass_.only_drafts),
        )  # fmt: skip

    def _drafts(self, store: int, num_rows: int, *, only_drafts: bool) -> bool:
        """Whether weights of fewer bits serve: nothing of the pass is committed, and it has few rows."""
        return only_drafts and bool(self._models[store].draft_layers) and num_rows <= _MAX_DRAFT_ROWS

    def _put_rows(self, parcel: Parcel, arranged: Arranged, pass_: Pass, head_rows: Int32) -> None:
        parcel.put("rows", arranged.columns)
        if arranged.tails is not None:
            parcel.put("tails", arranged.tails)
            parcel.set("tail_width", arranged.tails.shape[1])
        parcel.put("groups", arranged.groups)
        parcel.set("groups", len(arranged.groups))
        asked, masks, none = _asked(pass_), pass_.rows.masks, head_rows * 0
        t, stream = (none - 1, none) if asked is None or asked.noise is None else asked.noise
        parcel.put("draws", arranged.places[head_rows], t, stream, none if masks is None else masks[head_rows])
        parcel.set("draws", len(head_rows))

    def _send(self, parcel: Parcel, lane: Lane, update: TableUpdate) -> None:
        """One copy: the parcel, with bindings and table entries."""
        if self._binds:
            words = [np.concatenate([[row], record]) for row, record in self._binds.items()]
            parcel.put("binds", np.concatenate(words).astype(np.int32))
            parcel.set("binds", len(words))
            self._binds.clear()
        for first, masks in self._new_masks:
            self._state.allowed[first : first + len(masks)].copy_(torch.from_numpy(masks))
        self._new_masks.clear()
        if len(update):
            self.resident.table[update.seq_rows, update.positions] = update.slots
        if len(update) > MAX_UPDATES:
            self._write_table(update)
        elif len(update):
            parcel.put("updates", *update_columns(update))
            parcel.set("updates", len(update))
        self._state.sent[: len(parcel)].copy_(lane.sent_words[: len(parcel)], non_blocking=True)

    # Passes that the host takes part in.

    def _sampled_by_hand(self, pass_: Pass, lane: Lane) -> PassResult:
        """The pass and its rounds, one by one; the device's records are read before and written behind."""
        resident, records = self.resident, self._state.records
        kept = records.cpu().numpy()
        bound = list(self._binds)
        resident.next_tokens[:], resident.lengths[:] = kept[:, NEXT], kept[:, LENGTH]
        resident.next_tokens[bound] = NO_TOKEN
        self._longest(pass_, 0)
        self._read_table(np.unique(pass_.rows.seq_rows).astype(np.int64))
        if resident.has_edits[pass_.rows.seq_rows].any() or (pass_.burst is not None and pass_.burst.drafts):
            self._read_tokens(pass_)
        with np.errstate(all="ignore"):
            result = run_rounds(resident, pass_, lambda p: self._one_round(p, lane))
        if pass_.burst is not None:
            at = pass_.rows.seq_rows[pass_.burst.rows].astype(np.int64)
            values = np.stack([resident.next_tokens[at], resident.lengths[at]], axis=1).astype(np.int32)
            where = torch.from_numpy(at).to(self._device.name)
            records[where, NEXT : LENGTH + 1] = torch.from_numpy(values).to(self._device.name)
        self._write_table(resident.unsent)
        resident.unsent = NO_UPDATE
        self._lanes.append(lane)
        return result

    def _read_table(self, seq_rows: NDArray[np.int64]) -> None:
        """Slots of trees' paths have changed their places on the device."""
        found = self._state.inputs.table[torch.from_numpy(seq_rows).to(self._device.name)]
        self.resident.table[seq_rows] = found.cpu().numpy()

    def _write_table(self, update: TableUpdate) -> None:
        if len(update):
            columns = torch.from_numpy(np.stack(update_columns(update)).astype(np.int64)).to(self._device.name)
            self._state.inputs.table[columns[0], columns[1]] = columns[2].to(torch.int32)

    def _read_tokens(self, pass_: Pass) -> None:
        """The tokens of the pass's contexts, which the device alone may know: penalties count them."""
        resident, update, seq_rows = self.resident, pass_.table_update, np.unique(pass_.rows.seq_rows)
        resident.table[update.seq_rows, update.positions] = update.slots
        contexts = [resident.table[i, : self._reach[i]] for i in seq_rows]
        slots = np.unique(np.concatenate([*contexts, pass_.rows.tails.ravel()])).astype(np.int64)
        found = self._state.slot_tokens[torch.from_numpy(slots).to(self._device.name)]
        resident.slot_tokens[slots] = found.cpu().numpy()

    def _one_round(self, pass_: Pass, lane: Lane) -> PassResult:
        pass_ = replace(pass_, burst=None)
        ticket = self._started(pass_, lane)
        if ticket is None:
            return self._run(pass_, lane)
        result = ticket.result()
        self._lanes.remove(lane)  # it is still in use here
        return result

    def _run(self, pass_: Pass, lane: Lane) -> PassResult:
        head_rows, hidden, start = pass_.wanted.head_rows(), pass_.wanted.hidden, pass_.start
        parts, update = self._pieces(pass_.rows), pass_.table_update
        logits, states = list[torch.Tensor](), list[torch.Tensor]()
        heads, kept = [_within(head_rows, part) for part in parts], list[NDArray[np.int64]]()
        for part, (_, wanted) in zip(parts, heads, strict=True):
            piece = replace(pass_, rows=_some(pass_.rows, part), wanted=Wanted(), table_update=update)
            if hidden is not None:
                at, rows = _within(hidden.rows, part)
                kept.append(at)
                piece = replace(piece, wanted=Wanted(hidden=hidden._replace(rows=rows)))
            if start is not None:
                at, rows = _within(start.rows, part)
                piece = replace(piece, start=HiddenStart(rows, start.states[at]))
            found, found_states = self._forwarded(piece, wanted, lane)
            logits.append(found if len(parts) == 1 else found.clone())
            states.append(found_states)
            update = NO_UPDATE
        result = PassResult()
        if len(head_rows):
            every = self._ordered(logits, [at for at, _ in heads])
            result = self._outputs.collect(pass_, self.resident, head_rows, every)
        return result if hidden is None else replace(result, hidden=self._ordered(states, kept))

    def _ordered(self, parts: list[torch.Tensor], at: list[NDArray[np.int64]]) -> torch.Tensor:
        """What parts of a pass gave, in the order in which it was wanted."""
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts)[torch.from_numpy(np.argsort(np.concatenate(at))).to(self._device.name)]

    def _pieces(self, rows: Rows) -> list[NDArray[np.int64]]:
        """The rows in parts that fit, contexts first: within a part the order is the pass's."""
        spans = spans_of(int(rows.positions.max()) + 1)
        most = min(MAX_HEAD_ROWS, self._max_row_spans // spans // 2)
        if len(rows) <= most:
            return [np.arange(len(rows))]
        order = np.argsort(rows.positions, kind="stable")
        return [np.sort(order[i : i + most]) for i in range(0, len(rows), most)]

    def _forwarded(self, pass_: Pass, head_rows: Int32, lane: Lane) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of these rows, NaN where a row's context was not finite, and the hidden states that are wanted.

        The logits stand until the next pass.
        """
        rows, model, hidden = pass_.rows, self._models[pass_.store], pass_.wanted.hidden
        arranged = arrange(rows, len(head_rows), model.kernels.rows_per_group)
        spans = spans_of(int(rows.positions.max()) + 1)
        key = self._key(pass_, arranged, spans, Draw.NONE)
        graph = self._graphs.get(key)
        if pass_.start is not None:
            self._put_starts(model, pass_.start, arranged)
        parcel = Parcel(lane.sent)
        self._put_rows(parcel, arranged, pass_, head_rows)
        parcel.set("out_width", arranged.head)
        self._send(parcel, lane, pass_.table_update)
        graph.replay()
        logits = model.logits[: len(head_rows)]
        logits.masked_fill_(self._state.broken_rows[: len(head_rows), None] != 0, np.nan)
        if hidden is None:
            return logits, logits
        places, kept = torch.from_numpy(arranged.places[hidden.rows]).to(self._device.name), self._graphs.hidden(key)
        return logits, torch.stack([kept[i][places].float() for i in hidden.layers], dim=1)

    def _put_starts(self, model: DeviceModel, start: HiddenStart, arranged: Arranged) -> None:
        ids, states = model.starts()
        ids.fill_(-1)
        places = torch.from_numpy(arranged.places[start.rows]).to(self._device.name).long()
        ids[places] = torch.arange(len(places), dtype=torch.int32, device=self._device.name)
        states[: len(places)] = torch.as_tensor(start.states, device=self._device.name).to(torch.bfloat16)

    # What it is.

    def kv(self, store: int, slots: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Copies of K and V at these slots, [layers, slots, kv_heads, head_dim]; for tests and debugging."""
        model, at = self._models[store], torch.from_numpy(slots).to(self._device.name)
        return model.k[:, at].float().cpu().numpy(), model.v[:, at].float().cpu().numpy()

    def fingerprint(self, store: int = TARGET_STORE) -> dict[str, str]:
        """The arithmetic, dtypes and model shapes: no device, because bits depend on none."""
        return fingerprint([self._architectures[store]], CudaOptions(num_slots=1, num_seq_rows=1))

    def device(self) -> dict[str, str]:
        """What the speed depends on."""
        return self._device.describe()

    def wrong_answers(self) -> tuple[str, ...]:
        """The cases of the known-answer test that fail on this device."""
        with self._health.guarded():
            return answers.wrong_answers(self._device, self._architectures[TARGET_STORE].family)

    def probes(self) -> list[KernelProbe]:
        """The products, attention and draw of the target's model, each in the form that the number of rows asks for."""
        return self._health.guarding(probes(self._models[TARGET_STORE], self._device, self.limits))

    def close(self) -> None:
        """Drop weights, stores and graphs."""
        del self._graphs
        self._models, self._lanes = [], []


def _asked(pass_: Pass) -> DrawWanted | NoisyTopKWanted | None:
    """The rows that draw, or those that offer children."""
    return pass_.wanted.draw or pass_.wanted.noisy_top_k


def _drawn(pass_: Pass) -> Int32:
    asked = _asked(pass_)
    return asked.rows if asked is not None else np.zeros(0, np.int32)


def _num_children(pass_: Pass) -> int:
    return 0 if pass_.wanted.noisy_top_k is None else pass_.wanted.noisy_top_k.k


def _is_masked(pass_: Pass) -> bool:
    masks = pass_.rows.masks
    return masks is not None and bool(masks[_drawn(pass_)].any())


def _is_cohort(pass_: Pass) -> bool:
    """Whether the pass is one row for each of some sequences, all of which are fed back."""
    rows, burst, draw = pass_.rows, pass_.burst, pass_.wanted.draw
    assert burst is not None
    assert draw is not None
    count = len(draw.rows)
    return bool(
        count == len(burst.rows)
        and draw.noise is None
        and (draw.rows == np.arange(count)).all()
        and (burst.rows == draw.rows).all()
        and not rows.tail_lens[:count].any()
        and (rows.slots[count:] == DUMP_SLOT).all()
    )


def update_columns(update: TableUpdate) -> tuple[Int32, Int32, Int32]:
    """Rows, positions and slots."""
    return update.seq_rows, update.positions, update.slots


def _within(rows: Int32, part: NDArray[np.int64]) -> tuple[NDArray[np.int64], Int32]:
    """Which of these rows are in a part of the pass, and their places in it."""
    at = np.flatnonzero(np.isin(rows, part))
    return at, np.searchsorted(part, rows[at]).astype(np.int32)


def _some(rows: Rows, at: NDArray[np.int64]) -> Rows:
    return Rows(
        rows.token_ids[at], rows.positions[at], rows.slots[at], rows.seq_rows[at], rows.prefix_lens[at], rows.tails[at],
        rows.tail_lens[at], None if rows.masks is None else rows.masks[at],
    )  # fmt: skip


def _loaded(
    model: CudaModel, device: Device, limits: BackendLimits, loaded: Callable[[float], None], draft_weights: str
) -> DeviceModel:
    arch = model.architecture
    return DeviceModel(
        Shapes.of(arch), positions_of(arch, limits.context_len), model.read, num_slots=limits.num_slots + NUM_RESERVED,
        max_rows=MAX_PLACES, context_len=limits.context_len, tied=arch.tied_head, device=device,
        max_row_spans=_row_spans(Shapes.of(arch)), head_rows=MAX_HEAD_ROWS, loaded=loaded,
        draft_weights=draft_weights,
    )  # fmt: skip


def _kinds(models: Sequence[CudaModel], of_target: str, of_others: str) -> list[str]:
    """Of the second set of weights of each model, by which passes of few rows draft; empty for none."""
    others = [Shapes.of(model.architecture) for model in models[1:]]
    return [of_target, *(of_others if shapes.has_whole_chunks else "" for shapes in others)]


def _row_spans(shapes: Shapes) -> int:
    """The most rows times spans of one pass."""
    return min(_MOST_ROW_SPANS, _SPANS_NBYTES // (4 * shapes.heads * (shapes.head_dim + 2)))


def _report(progress: Progress, index: int, num_models: int, share: float) -> None:
    progress("loading", (index + share) / num_models)
